"""One request as the engine sees it: its token ids, and how far they have been run through the model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from labinfer.plan import NO_TOKEN, SamplingParams, TokenSampling


class FinishReason(str, Enum):
    """Why a request ended; ``stop`` and ``length`` as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(eq=False)
class Sequence:
    """Token ids and positions are the whole state; everything else can be computed again."""

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    """Tokens that may be generated: the request's limit, cut to the context."""
    num_scheduled: int = 0
    """Tokens sent through the model so far, those in flight included."""
    num_in_flight: int = 0
    """Micro-batches on their way that contain this sequence."""
    block_table: list[int] = field(default_factory=list)
    num_blocks_sent: int = 0
    """How many of these the workers know."""
    started: bool = False
    """Whether the workers know this sequence."""
    pending_token: int = NO_TOKEN
    """A sampled token the workers have not been told yet."""
    finish_reason: FinishReason | None = None
    cache_salt: str = ""
    """Only requests with the same salt find each other's blocks."""
    digests: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as they were needed; see ``block_manager.extend_chain``."""
    num_registered: int = 0
    """Blocks of its table that can be found by others."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first admitted."""
    num_preemptions: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float = 0.0

    @property
    def num_unscheduled(self) -> int:
        """Tokens that are known but not sent through the model."""
        return len(self.token_ids) - self.num_scheduled

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """One token to run, with all before it in the cache or on their way there."""
        return self.num_scheduled > 0 and self.num_unscheduled == 1 and self.num_output_tokens > 0

    @property
    def token_sampling(self) -> TokenSampling:
        return TokenSampling(self.sampling.temperature, self.sampling.top_p, self.sampling.top_k, self.sampling.seed)

    def forget_cache(self) -> None:
        """Back to having nothing computed (preemption by recompute)."""
        self.num_scheduled = 0
        self.block_table = []
        self.num_blocks_sent = self.num_registered = 0
        self.started = False
        self.pending_token = NO_TOKEN
