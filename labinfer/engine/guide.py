"""Guide: the token mask of a structured output, advanced token by token. The engine knows neither grammar nor text."""

from __future__ import annotations

from typing import Protocol

from labinfer.base.structured_outputs import StructuredOutputs


class Guide(Protocol):
    """Grammar matcher of one answer. Its state is a function of the answer's tokens alone."""

    mask: bytes
    """Bit mask of the allowed next tokens: token i is allowed if bit ``i % 8`` of byte ``i // 8`` is set; bits beyond the mask's
    end are 0. Stop tokens are allowed if the answer is complete. Empty: no further token is allowed."""
    error: str
    """Reason why an incomplete answer has no allowed token; empty otherwise."""

    def accept(self, token: int) -> None:
        """Advance by ``token``, which the mask allows."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens, and an error that they caused."""
        ...


class GuideMaker(Protocol):
    """Makes guides for the vocabulary of one checkpoint."""

    def make(self, form: StructuredOutputs, before: str = "") -> Guide:
        """Make a guide at the beginning of an answer, with at least one token allowed.

        Args:
            before: ``Request.before_form``.

        Raises:
            UserError: ``form`` is invalid or unsupported; the text says why.
        """
        ...


def allows(mask: bytes, token: int) -> bool:
    """Whether ``mask`` allows ``token``."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
