"""Spelling: how a single token reads, and the bytes it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
SPACE = "▁"
"""As SentencePiece writes it."""
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte of SentencePiece's byte fallback."""


@dataclass(frozen=True, slots=True)
class Spelling:
    token: str
    """As it reads alone; one that adds nothing to a text goes by its name."""
    num_characters: int
    """That it adds to a text, alone."""
    bytes: tuple[int, ...] | None
    """UTF-8, also where they are a part of a character; None where nothing tells."""


def spell(token_id: int, text: str, name: str | None) -> Spelling:
    """The spelling of a token.

    Args:
        text: what it decodes to alone.
        name: its entry in the vocabulary; None if it has none.
    """
    if REPLACEMENT in text:
        return Spelling(text, len(text), name and _bytes_of(name, text))
    if not text and name and not name.strip(SPACE):
        text = " " * len(name)  # which SentencePiece takes from the beginning of a text
    token = text or name
    if not token:
        return unnamed(token_id)
    return Spelling(token, len(text), tuple(token.encode()))


def unnamed(token_id: int) -> Spelling:
    """Of a token that nobody can read."""
    return Spelling(f"token_id:{token_id}", 0, None)


def _bytes_of(name: str, text: str) -> tuple[int, ...] | None:
    """The bytes that an entry of a vocabulary stands for, if they read as ``text``."""
    if fallback := _FALLBACK.fullmatch(name):
        found = bytes([int(fallback[1], 16)])
    elif all(letter in BYTE_LETTERS for letter in name):
        found = bytes(BYTE_LETTERS[letter] for letter in name)
    else:
        return None
    return tuple(found) if found.decode("utf-8", "replace") == text else None


def _byte_letters() -> dict[str, int]:
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_LETTERS = _byte_letters()
"""Byte-level BPE writes each byte as one letter (GPT-2, Radford et al. 2019: ``bytes_to_unicode`` of its encoder.py)."""
