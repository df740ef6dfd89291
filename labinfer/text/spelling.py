"""Spelling: the text of a single token, and the bytes it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
SPACE = "▁"
"""SentencePiece's letter for a space."""
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""An entry of SentencePiece's byte fallback."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """Text and bytes of a single token."""

    token: str
    """Text of the token; its name in the vocabulary where it adds no text."""
    num_characters: int
    """Characters that the token alone adds to a text."""
    bytes: tuple[int, ...] | None
    """UTF-8 of the token, which may be a part of a character; None where it is not known."""


def spell(token_id: int, text: str, name: str | None) -> Spelling:
    """The spelling of a token.

    Args:
        text: what the token adds to a text.
        name: the token's entry in the vocabulary; None if it has none.
    """
    if REPLACEMENT in text:
        return Spelling(text, len(text), name and _vocabulary_bytes(name, text))
    token = text or name
    if not token:
        return unnamed(token_id)
    return Spelling(token, len(text), tuple(token.encode()))


def unnamed(token_id: int) -> Spelling:
    """The spelling of a token without text and name."""
    return Spelling(f"token_id:{token_id}", 0, None)


def _vocabulary_bytes(name: str, text: str) -> tuple[int, ...] | None:
    """The bytes that an entry of a vocabulary stands for; None unless they decode as ``text``."""
    if fallback := _FALLBACK.fullmatch(name):
        encoded = bytes([int(fallback[1], 16)])
    elif all(letter in BYTE_LETTERS for letter in name):
        encoded = bytes(BYTE_LETTERS[letter] for letter in name)
    else:
        return None
    return tuple(encoded) if encoded.decode("utf-8", "replace") == text else None


def _byte_letters() -> dict[str, int]:
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_LETTERS = _byte_letters()
"""Byte for each letter of byte-level BPE (GPT-2, Radford et al. 2019: ``bytes_to_unicode`` of its encoder.py)."""
