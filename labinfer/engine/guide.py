"""Guide: which tokens may come next in an answer that must have a form. The engine only asks; it knows no text."""

from __future__ import annotations

from typing import Protocol

from labinfer.base.structured_outputs import StructuredOutputs


class Guide(Protocol):
    """Follows one answer. What it says is a function of the answer's tokens."""

    mask: bytes
    """Tokens that may come next: token i is allowed where bit ``i % 8`` of byte ``i // 8`` is set; bits beyond its end are 0.
    Tokens that end an answer are allowed where it is complete. Empty: no token may come any more."""
    error: str
    """Why no token may come although the answer is not complete; empty otherwise."""

    def accept(self, token: int) -> None:
        """Go on behind this token, one of the allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many tokens, an error that came with them included."""
        ...


class GuideMaker(Protocol):
    """Makes guides for one checkpoint's tokens."""

    def make(self, form: StructuredOutputs, before: str = "") -> Guide:
        """A guide at the beginning of an answer, with at least one token allowed.

        Args:
            before: ``Request.before_form``.

        Raises:
            UserError: the form cannot be followed; the text says why.
        """
        ...


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask has this token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
