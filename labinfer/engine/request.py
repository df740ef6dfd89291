"""What the engine is asked for, and how it may end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from labinfer.plan import SamplingParams


class FinishReason(str, Enum):
    """Why a request ended; ``stop`` and ``length`` as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted of it; ``key`` is the caller's own name for it."""

    key: Any
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    """Only requests with the same salt share KV blocks."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """The sampling's bad words as token ids."""
    priority: int = 0
    """With ``--scheduling-policy priority`` the lowest goes first."""
    user: str = ""
    """With ``--scheduling-policy fair`` users take turns."""

    def ends(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end an answer: the request's own, and those of the checkpoint unless it ignores them."""
        stops = self.sampling.stop_token_ids
        if self.sampling.ignore_eos:
            return frozenset(stops)
        return eos_token_ids.union(stops) if stops else eos_token_ids
