"""Token by token back to text, without ever splitting a character or letting out a part of a stop string."""

from __future__ import annotations

from labinfer.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes; text that still ends in U+FFFD after more tokens really says so."""
CONTEXT_TOKENS = 6
"""Tokens decoded again before the new ones: how a token reads can depend on its neighbours (SentencePiece drops a
leading space; bytes of one character may be spread over several tokens)."""


class Detokenizer:
    """The text of one request as its tokens come in."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._stop = stop
        self._token_ids: list[int] = []
        self._prefix, self._read = 0, 0  # tokens [prefix, read) are context, [read, end) are not in the text yet
        self.text = ""
        self.stopped = False

    def add(self, token_id: int) -> bool:
        """Take one more token. Returns whether a stop string is complete; the text then ends before it."""
        self._token_ids.append(token_id)
        before = self._tokenizer.decode(self._token_ids[self._prefix : self._read])
        after = self._tokenizer.decode(self._token_ids[self._prefix :])
        complete = not after.endswith(REPLACEMENT) or len(self._token_ids) - self._read > MAX_CHARACTER_TOKENS
        if len(after) > len(before) and complete:
            self._append(after[len(before) :])
            self._read = len(self._token_ids)
            self._prefix = max(0, self._read - CONTEXT_TOKENS)
        return self.stopped

    def _append(self, piece: str) -> None:
        longest = max((len(text) for text in self._stop), default=0)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [index for text in self._stop if (index := self.text.find(text, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
