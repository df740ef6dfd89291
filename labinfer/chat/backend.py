"""Backend: who answers in a chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.errors import UserError

TOO_SHORT_SECONDS = 0.1
"""To tell a rate from: tokens that come so close together may come in one piece."""


class AnswerFailed(UserError):
    """There is no answer to this message; the chat can go on."""


@dataclass
class Answer:
    """What has come of an answer; None is what nobody knows."""

    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt's, those that were found in the KV cache."""
    num_tokens: int | None = None
    finish_reason: str = ""
    """OpenAI's, or ``stopped`` where the user has stopped it."""
    seconds: float = 0.0
    seconds_to_first: float | None = None

    def describe(self) -> str:
        """The figures in a line."""
        parts = [f"{_count(self.num_tokens)} tokens in {self.seconds:.2f} s"]
        if self.num_tokens and self.seconds_to_first is not None:
            after_first = self.seconds - self.seconds_to_first
            is_short = after_first < TOO_SHORT_SECONDS
            rate = self.num_tokens / self.seconds if is_short else (self.num_tokens - 1) / after_first
            parts.append(f"{rate:.1f} tokens/s")
        if self.seconds_to_first is not None:
            parts.append(f"first after {self.seconds_to_first:.3f} s")
        parts.append(f"prompt of {_count(self.prompt_tokens)} tokens, {_count(self.cached_tokens)} of them cached")
        parts.append(f"ended by {self.finish_reason or 'nobody knows what'}")
        return "; ".join(parts)


class Backend(Protocol):
    """A model, wherever it runs."""

    model: str
    """Its name."""

    def describe(self) -> str:
        """Which model, and where.

        Raises:
            AnswerFailed: it does not answer now.
        """

    def stream(self, messages: list[dict[str, str]], settings: dict[str, Any], answer: Answer) -> Iterator[str]:
        """The pieces of the text as they come. Closing the iterator ends the work for it, wherever that is done.

        Args:
            settings: fields of ``SamplingParams``; the others are as the model or its server would have them.
            answer: is given what becomes known beside the text.

        Raises:
            AnswerFailed: there is no answer, or no more of it.
            Interrupted: a signal came.
        """


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
