"""TokenText: text and bytes of a single token, as logprobs show them."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.text.utf8_decoder import REPLACEMENT


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text and bytes of a single token."""

    token: str
    """Text of the token; if it adds no text, its vocabulary entry."""
    num_characters: int
    """Number of characters that the token adds to a text by itself."""
    bytes: tuple[int, ...] | None
    """UTF-8 bytes of the token, which may be only a part of a character; None if unknown."""


def make_token_text(token_id: int, text: str, name: str | None, data: bytes | None) -> TokenText:
    """Text and bytes of a token.

    Args:
        text: text that the token adds to other text.
        name: the token's entry in the vocabulary; None if it has none.
        data: UTF-8 bytes of the token, which may be only a part of a character; None if only the text is known.
    """
    token = text or name
    if not token:
        return unnamed_token(token_id)
    if not text or data is None:
        data = None if REPLACEMENT in text else token.encode()
    return TokenText(token, len(text), None if data is None else tuple(data))


def unnamed_token(token_id: int) -> TokenText:
    """Text and bytes of a token for which neither text nor vocabulary entry is known."""
    return TokenText(f"token_id:{token_id}", 0, None)
