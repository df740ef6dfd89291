"""Backend: the interface of a model to chat with; ChatReply: the model's answer so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.base.errors import UserError

TOO_SHORT_SECONDS = 0.1
"""Minimum duration, in seconds, for which tokens per second are computed: tokens that arrive in less time may have arrived in one
piece."""


class AnswerFailed(UserError):
    """A message of the user gets no answer, or an incomplete one; the chat can continue."""


class MessageRefused(AnswerFailed):
    """The backend refuses a message of the user, for example because it is too long. A retry does not help."""


class ReasoningPiece(str):
    """Piece of reasoning in the stream of an answer's text."""


@dataclass(kw_only=True)
class ChatReply:
    """A model's answer so far, with its token counts and times. None means that a value is unknown."""

    text: str = ""
    reasoning: str = ""
    """Reasoning before the answer. It is not sent back to the model with later messages."""
    reasoning_seconds: float = 0.0
    """Seconds from the first piece of reasoning to the first piece of the answer, or to the end of the reasoning if there is
    none."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were prefix-cache hits."""
    num_tokens: int | None = None
    finish_reason: str = ""
    """OpenAI's finish reason; ``stopped`` if the user stopped the answer."""
    seconds: float = 0.0
    seconds_to_first: float | None = None

    def describe(self) -> str:
        """One line of text with the known token counts, times and rates."""
        count = "" if self.num_tokens is None else f"{_tokens(self.num_tokens)} in "
        parts = [f"{count}{self.seconds:.2f} s"]
        if self.num_tokens and self.seconds_to_first is not None:
            after_first = self.seconds - self.seconds_to_first
            is_short = after_first < TOO_SHORT_SECONDS
            rate = self.num_tokens / self.seconds if is_short else (self.num_tokens - 1) / after_first
            parts.append(f"{rate:.1f} tokens/s")
        if self.seconds_to_first is not None:
            parts.append(f"TTFT {self.seconds_to_first:.3f} s")
        if self.reasoning:
            parts.append(f"{self.reasoning_seconds:.1f} s of reasoning")
        if self.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
            parts.append(f"{self.prompt_tokens} prompt token{'s' * (self.prompt_tokens != 1)}{cached}")
        if self.finish_reason:
            parts.append(f"finish reason {self.finish_reason}")
        return "; ".join(parts)


class Backend(Protocol):
    """A model to chat with: loaded on the ranks of this launch, or behind a server."""

    model: str
    """Name of the model."""

    def describe(self) -> str:
        """Name and location of the model.

        Raises:
            AnswerFailed: the model is not available now.
        """

    def stream(self, messages: list[dict[str, str]], settings: dict[str, Any], answer: ChatReply) -> Iterator[str]:
        """Yield the answer's text in pieces as they arrive, with reasoning as ``ReasoningPiece``. Closing the iterator aborts the
        generation.

        Args:
            settings: fields of ``SamplingParams``; for missing fields the model's or the server's defaults count.
            answer: object that receives all other values of the answer, such as token counts.

        Raises:
            AnswerFailed: there is no answer, or it has broken off.
            Interrupted: a signal arrived.
        """


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
