"""TokenOffsets: character offsets of tokens in their text."""

from __future__ import annotations

from labinfer.text.token_text import unnamed_token
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.utf8_decoder import REPLACEMENT, Utf8Decoder


class TokenOffsets:
    """Incremental character offsets of tokens.

    A token begins after the last character that is complete before it. All bytes of a character have the character's offset. An
    undecodable byte counts as a character (U+FFFD).

    Args:
        tokenizer: None if the checkpoint has none; tokens then add no text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._utf8 = Utf8Decoder()
        self._offset = 0

    def read_prompt(self, token_ids: list[int], text: str) -> tuple[list[str], list[int]]:
        """Texts and offsets of the tokens of a prompt, at the start of the text.

        Args:
            text: the prompt. Special tokens advance the offset only if they are written in it.
        """
        tokens, offsets, is_first = [], [], True
        for token_id in token_ids:
            token = self._add(token_id, offsets)
            if self._offset > offsets[-1]:
                if is_first and token == f" {(own := self._tokenizer.decode([token_id]))}":  # SentencePiece's space
                    token, self._offset = own, self._offset - 1
                is_first = False
            elif text.startswith(token, self._offset):
                self._offset += len(token)
            tokens.append(token)
        return tokens, offsets

    def read(self, token_ids: list[int]) -> tuple[list[str], list[int]]:
        """Texts and offsets of further tokens."""
        offsets: list[int] = []
        return [self._add(token_id, offsets) for token_id in token_ids], offsets

    def _add(self, token_id: int, offsets: list[int]) -> str:
        """The text of the next token; appends its offset to ``offsets``."""
        token = self._tokenizer.token_text(token_id) if self._tokenizer else unnamed_token(token_id)
        if not token.num_characters or token.bytes is None:
            offsets.append(self._offset)
            self._offset += token.num_characters
            return token.token
        data, num_pending = bytes(token.bytes), len(self._utf8.pending)
        text = self._utf8.decode(data[:1])
        if num_pending and text.startswith(REPLACEMENT * num_pending):  # the token does not complete the character
            self._offset, text = self._offset + num_pending, text[num_pending:]
        offsets.append(self._offset)
        self._offset += len(text) + len(self._utf8.decode(data[1:]))
        return token.token
