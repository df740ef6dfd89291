"""TokenText: the text and the bytes of a single token, as shown in log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.text.utf8_decoder import REPLACEMENT


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text and bytes of a single token."""

    token: str
    """Text of the token; its name in the vocabulary if it adds no text."""
    num_characters: int
    """Characters that the token alone adds to a text."""
    bytes: tuple[int, ...] | None
    """UTF-8 bytes of the token, maybe a part of a character; None if unknown."""


def make_token_text(token_id: int, text: str, name: str | None, data: bytes | None) -> TokenText:
    """Text and bytes of a token.

    Args:
        text: text that the token adds.
        name: the token's entry in the vocabulary; None if it has none.
        data: UTF-8 bytes of ``text``, maybe a part of a character; None if only the text is known.
    """
    token = text or name
    if not token:
        return unnamed_token(token_id)
    if not text or data is None:
        data = None if REPLACEMENT in text else token.encode()
    return TokenText(token, len(text), None if data is None else tuple(data))


def unnamed_token(token_id: int) -> TokenText:
    """Text and bytes of a token without text and name."""
    return TokenText(f"token_id:{token_id}", 0, None)
