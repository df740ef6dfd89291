"""ByteRules: the bytes of each token, for tokenizers that decode a text from the joined bytes of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_TOKENS = 1 << 16
"""Maximum number of tokens whose bytes are cached."""
FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Pattern of a vocabulary entry that stands for a single byte, in vocabularies with byte fallback."""

Step = Callable[[str, bool], str | bytes]
"""A step of a tokenizer's decoder. Called with a vocabulary entry (or the text that the previous step made of it) and whether the
token is the first of a text. If a step returns bytes, it is the last one."""


@dataclass(frozen=True)
class ByteRules:
    """Bytes of tokens, for a decoder whose text depends only on the joined bytes of the tokens."""

    token_bytes: Callable[[int], bytes]
    """Bytes of a token that is not the first of a text."""
    first_token_bytes: Callable[[int], bytes]
    """Bytes of a token that is the first of a text."""
    stripped: str = ""
    """Character that is removed from the beginning of a decoded text."""
    num_stripped: int = 0
    """Maximum number of ``stripped`` characters that are removed from a decoded text."""


def read_byte_rules(decoder: dict[str, Any], name: Callable[[int], str | None]) -> ByteRules | None:
    """Read the byte rules from the decoder of a ``tokenizer.json``. None if the text of a token depends on the tokens around it (as
    with WordPiece), or if a ``Replace`` step follows the step that makes bytes.

    Args:
        decoder: JSON of the decoder (Hugging Face tokenizers, ``decoders``).
        name: returns the vocabulary entry of a token id.
    """
    steps: list[Step] = []
    is_joined, stripped, num_stripped = False, "", 0
    for step in _flatten(decoder):
        match step:
            case {"type": "Fuse"}:
                is_joined = True
            case {"type": "Strip", "content": content, "start": start, "stop": 0} if is_joined and not stripped:
                stripped, num_stripped = content, start
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if (
                not stripped and not {_read_letters, _read_fallback} & {*steps} and (len(pattern) == 1 or not is_joined)
            ):
                steps.append(lambda text, is_first, old=pattern, new=content: text.replace(old, new))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not is_joined:
                steps.append(
                    lambda text, is_first, mark=mark, begins=scheme != "never": text.replace(
                        mark, "" if is_first and begins else " "
                    )
                )
            case {"type": "ByteFallback"} if not is_joined:
                steps.append(_read_fallback)
            case {"type": "ByteLevel"} if not is_joined and _read_fallback not in steps:
                steps.append(_read_letters)
                is_joined = True
            case _:
                return None

    def read(token_id: int, is_first: bool) -> bytes:
        text: str | bytes = name(token_id) or ""
        for step in steps:
            if isinstance(text, bytes):
                break
            text = step(text, is_first)
        return text if isinstance(text, bytes) else text.encode()

    token_bytes = lru_cache(MAX_TOKENS)(lambda token_id: read(token_id, False))
    return ByteRules(token_bytes, lambda token_id: read(token_id, True), stripped, num_stripped)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _read_fallback(text: str, is_first: bool) -> str | bytes:
    fallback = FALLBACK.fullmatch(text)
    return bytes([int(fallback[1], 16)]) if fallback else text


def _read_letters(text: str, is_first: bool) -> bytes:
    if all(letter in BYTE_LETTERS for letter in text):
        return bytes(BYTE_LETTERS[letter] for letter in text)
    return text.encode()


def _byte_letters() -> dict[str, int]:
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_LETTERS = _byte_letters()
"""Byte for each letter by which byte-level BPE writes bytes (Radford et al. 2019; ``bytes_to_unicode`` in GPT-2's encoder.py)."""
