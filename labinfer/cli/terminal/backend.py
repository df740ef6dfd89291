"""Backend: who answers in a chat, and what an answer is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.base.errors import UserError

TOO_SHORT_SECONDS = 0.1
"""To tell a rate from: tokens that come so close together may come in one piece."""


class AnswerFailed(UserError):
    """There is no answer to this message; the chat can go on."""


class MessageRefused(AnswerFailed):
    """The message will not be answered as it is, however often it is sent: it may be too long."""


class Thought(str):
    """A piece of what the model thinks before it answers."""


@dataclass(kw_only=True)
class ChatReply:
    """An answer so far; None stands for what nobody knows."""

    text: str = ""
    thought: str = ""
    """Thoughts before the answer; no part of the conversation."""
    thought_seconds: float = 0.0
    """From the first piece of the thoughts to the first of the answer, or to its end."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that came from the KV cache."""
    num_tokens: int | None = None
    finish_reason: str = ""
    """OpenAI's, or ``stopped`` where the user has stopped it."""
    seconds: float = 0.0
    seconds_to_first: float | None = None

    def describe(self) -> str:
        """The figures in a line, as far as they are known."""
        count = "" if self.num_tokens is None else f"{_tokens(self.num_tokens)} in "
        parts = [f"{count}{self.seconds:.2f} s"]
        if self.num_tokens and self.seconds_to_first is not None:
            after_first = self.seconds - self.seconds_to_first
            is_short = after_first < TOO_SHORT_SECONDS
            rate = self.num_tokens / self.seconds if is_short else (self.num_tokens - 1) / after_first
            parts.append(f"{rate:.1f} tokens/s")
        if self.seconds_to_first is not None:
            parts.append(f"first after {self.seconds_to_first:.3f} s")
        if self.thought:
            parts.append(f"thought for {self.thought_seconds:.1f} s")
        if self.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f", {self.cached_tokens} of them cached"
            parts.append(f"prompt of {_tokens(self.prompt_tokens)}{cached}")
        if self.finish_reason:
            parts.append(f"ended by {self.finish_reason}")
        return "; ".join(parts)


class Backend(Protocol):
    """A model, wherever it runs."""

    model: str
    """Name of the model."""

    def describe(self) -> str:
        """Which model, and where.

        Raises:
            AnswerFailed: it does not answer now.
        """

    def stream(self, messages: list[dict[str, str]], settings: dict[str, Any], answer: ChatReply) -> Iterator[str]:
        """The pieces of the text as they come, thoughts as ``Thought``. Closing the iterator ends the work for it, wherever that is done.

        Args:
            settings: fields of ``SamplingParams``; the others are as the model or its server would have them.
            answer: is given what becomes known beside the text.

        Raises:
            AnswerFailed: there is no answer, or no more of it.
            Interrupted: a signal came.
        """


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"
