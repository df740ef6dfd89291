"""Spelling: the text and the bytes of a single token, as shown in log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.text.utf8_decoder import REPLACEMENT


@dataclass(frozen=True, slots=True)
class Spelling:
    """Text and bytes of a single token."""

    token: str
    """Text of the token; its name in the vocabulary if it adds no text."""
    num_characters: int
    """Characters that the token alone adds to a text."""
    bytes: tuple[int, ...] | None
    """UTF-8 bytes of the token, maybe a part of a character; None if unknown."""


def spell(token_id: int, text: str, name: str | None, data: bytes | None) -> Spelling:
    """The spelling of a token.

    Args:
        text: text that the token adds.
        name: the token's entry in the vocabulary; None if it has none.
        data: UTF-8 bytes of ``text``, maybe a part of a character; None if only the text is known.
    """
    token = text or name
    if not token:
        return unnamed(token_id)
    if not text or data is None:
        data = None if REPLACEMENT in text else token.encode()
    return Spelling(token, len(text), None if data is None else tuple(data))


def unnamed(token_id: int) -> Spelling:
    """The spelling of a token without text and name."""
    return Spelling(f"token_id:{token_id}", 0, None)
