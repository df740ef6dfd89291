"""TokenOffsets: the position in the text, in characters, at which each token begins."""

from __future__ import annotations

from labinfer.text.token_text import unnamed_token
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.utf8_decoder import REPLACEMENT, Utf8Decoder


class TokenOffsets:
    """Counts the characters of tokens, to get the offset of each token in the text.

    The offset of a token is the number of characters that are complete before it. Tokens that are bytes of one character all have
    the character's offset. An undecodable byte counts as a character (U+FFFD).

    Args:
        tokenizer: the checkpoint's tokenizer; None if it has none, in which case tokens add no text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._utf8 = Utf8Decoder()
        self._offset = 0

    def read_prompt(self, token_ids: list[int], text: str) -> tuple[list[str], list[int]]:
        """Text and offset of each token of a prompt. Call this before ``read``: offsets count from the beginning of the prompt.

        Args:
            text: text of the prompt. A special token moves the offsets of later tokens only if ``text`` has the special token's text there.
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
        """Text and offset of each of ``token_ids``, which follow the tokens of earlier calls."""
        offsets: list[int] = []
        return [self._add(token_id, offsets) for token_id in token_ids], offsets

    def _add(self, token_id: int, offsets: list[int]) -> str:
        """Text of the next token, ``token_id``. Appends the token's offset to ``offsets``."""
        token = self._tokenizer.token_text(token_id) if self._tokenizer else unnamed_token(token_id)
        if not token.num_characters or token.bytes is None:
            offsets.append(self._offset)
            self._offset += token.num_characters
            return token.token
        data, num_pending = bytes(token.bytes), len(self._utf8.pending)
        text = self._utf8.decode(data[:1])
        if num_pending and text.startswith(REPLACEMENT * num_pending):  # the token does not complete a character
            self._offset, text = self._offset + num_pending, text[num_pending:]
        offsets.append(self._offset)
        self._offset += len(text) + len(self._utf8.decode(data[1:]))
        return token.token
