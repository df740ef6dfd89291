"""TokenDecoder: incremental conversion of token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from labinfer.text.byte_rules import ByteRules
from labinfer.text.utf8_decoder import REPLACEMENT, Utf8Decoder

MAX_INCOMPLETE = 3
"""Maximum number of U+FFFD characters at the end of a text that further bytes may turn into a character: a UTF-8
character has at most four bytes."""
MAX_UNREAD_TOKENS = 64
"""Maximum number of tokens that are decoded again with every further token, because their text ends in U+FFFD. The text of more
tokens counts as final."""
CONTEXT_TOKENS = 6
"""Number of earlier tokens that ``ContextDecoder`` decodes together with a new one, as the text of a token can depend on the tokens
before it."""


class TokenDecoder(Protocol):
    """Converts one sequence of token ids to text. The results of ``add`` and ``finish``, joined, equal the result of
    ``decode``."""

    def add(self, token_id: int) -> str:
        """Add a token. Returns the text that becomes final by this token, in whole characters."""

    def finish(self) -> str:
        """End the sequence. Returns the remaining text, with one U+FFFD for each byte of an incomplete character."""

    def decode(self, token_ids: list[int]) -> str:
        """Convert a whole sequence to text. Only for decoders to which no token was added."""


class ByteDecoder:
    """Decoder for tokenizers whose text depends only on the bytes of the tokens.

    Args:
        hidden: ids of tokens that add no text.
        inside: whether the tokens continue an earlier text. If not, ``rules`` say which characters are stripped from the beginning.
    """

    def __init__(self, rules: ByteRules, hidden: Collection[int], inside: bool):
        self._rules, self._bytes_of, self._hidden = rules, rules.token_bytes, hidden
        self._is_first = not inside
        self._num_to_strip = 0 if inside else rules.num_stripped
        self._utf8 = Utf8Decoder()

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._is_first:
            self._is_first = False
            return self._strip(self._utf8.decode(self._rules.first_token_bytes(token_id)))
        text = self._utf8.decode(self._bytes_of(token_id))
        return self._strip(text) if self._num_to_strip else text

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", is_last=True))

    def decode(self, token_ids: list[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._hidden]
        first = self._rules.first_token_bytes(shown.pop(0)) if self._is_first and shown else b""
        return self._strip(self._utf8.decode(first + b"".join(map(self._bytes_of, shown)), is_last=True))

    def _strip(self, text: str) -> str:
        while text and self._num_to_strip:
            if not text.startswith(self._rules.stripped):
                self._num_to_strip = 0
                break
            text, self._num_to_strip = text[1:], self._num_to_strip - 1
        return text


class ContextDecoder:
    """Decoder for libraries that do not give the bytes of single tokens (WordPiece, BPE with suffixes).

    Args:
        decode: returns the text of token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self._token_ids: list[int] = []
        self._prefix, self._read = 0, 0  # tokens [prefix, read) are context; the text of [read, end) may still change
        self._num_shown = 0  # number of characters of tokens [read, end) that were returned

    def add(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._unread()
        settled = text[:-MAX_INCOMPLETE] + text[-MAX_INCOMPLETE:].rstrip(REPLACEMENT)
        begin, self._num_shown = self._num_shown, max(self._num_shown, len(settled))  # a text may become shorter
        if text and (settled == text or len(self._token_ids) - self._read > MAX_UNREAD_TOKENS):
            self._num_shown, settled = 0, text
            self._read = len(self._token_ids)
            self._prefix = max(0, self._read - CONTEXT_TOKENS)
        return settled[begin:]

    def finish(self) -> str:
        begin, self._num_shown = self._num_shown, 0
        text = self._unread()[begin:]
        self._read = len(self._token_ids)
        return text

    def _unread(self) -> str:
        before = self.decode(self._token_ids[self._prefix : self._read])
        after = self.decode(self._token_ids[self._prefix :])
        return after[len(before) :]
