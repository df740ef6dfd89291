"""Backend: the interface of a model that answers a chat, and the reply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.base.errors import UserError

TOO_SHORT_SECONDS = 0.1
"""Shortest time from which to compute a token rate: tokens this close together may arrive in one piece."""


class AnswerFailed(UserError):
    """There is no answer to this message; the chat can continue."""


class MessageRefused(AnswerFailed):
    """The message itself is refused, for example as too long; a retry does not help."""


class Thought(str):
    """A piece of the model's reasoning."""


@dataclass(kw_only=True)
class ChatReply:
    """An answer so far; None means unknown."""

    text: str = ""
    thought: str = ""
    """Reasoning before the answer; not part of the conversation."""
    thought_seconds: float = 0.0
    """From the first piece of reasoning to the first piece of the answer, or to its end."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were prefix-cache hits."""
    num_tokens: int | None = None
    finish_reason: str = ""
    """OpenAI's finish reason, or ``stopped`` if the user has stopped the answer."""
    seconds: float = 0.0
    seconds_to_first: float | None = None

    def describe(self) -> str:
        """The known figures in one line."""
        count = "" if self.num_tokens is None else f"{_tokens(self.num_tokens)} in "
        parts = [f"{count}{self.seconds:.2f} s"]
        if self.num_tokens and self.seconds_to_first is not None:
            after_first = self.seconds - self.seconds_to_first
            is_short = after_first < TOO_SHORT_SECONDS
            rate = self.num_tokens / self.seconds if is_short else (self.num_tokens - 1) / after_first
            parts.append(f"{rate:.1f} tokens/s")
        if self.seconds_to_first is not None:
            parts.append(f"TTFT {self.seconds_to_first:.3f} s")
        if self.thought:
            parts.append(f"{self.thought_seconds:.1f} s of reasoning")
        if self.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
            parts.append(f"{self.prompt_tokens} prompt token{'s' * (self.prompt_tokens != 1)}{cached}")
        if self.finish_reason:
            parts.append(f"finish reason {self.finish_reason}")
        return "; ".join(parts)


class Backend(Protocol):
    """A model on these ranks or behind a server."""

    model: str
    """Name of the model."""

    def describe(self) -> str:
        """Name and location of the model.

        Raises:
            AnswerFailed: the model is not available now.
        """

    def stream(self, messages: list[dict[str, str]], settings: dict[str, Any], answer: ChatReply) -> Iterator[str]:
        """The pieces of the text as they arrive, reasoning as ``Thought``. Closing the iterator aborts the generation.

        Args:
            settings: fields of ``SamplingParams``; others have the defaults of the model or its server.
            answer: receives all other information on the answer.

        Raises:
            AnswerFailed: there is no answer, or it broke off.
            Interrupted: a signal arrived.
        """


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
