"""ThoughtTokens: how many tokens of an answer are thoughts."""

from __future__ import annotations

from bisect import bisect_left

from labinfer.text.reply_parser import ReplyParser
from labinfer.text.tokenizer import Tokenizer


class ThoughtTokens:
    """Counts the tokens of one answer's thoughts, their marks included.

    A token belongs to the text that it ends in. Positions of thoughts that are over are looked up once, so that an answer may
    be counted again and again while it grows.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._num_before: dict[int, int] = {}  # tokens, by the position in the text

    def count(self, parser: ReplyParser, token_ids: list[int]) -> int:
        """The number of them.

        Args:
            parser: one that was fed with the answer's text.
        """
        return sum(self._count_to(end, token_ids) - self._count_to(begin, token_ids) for begin, end in parser.thoughts)

    def _count_to(self, position: int | None, token_ids: list[int]) -> int:
        if position is None:
            return len(token_ids)
        if position not in self._num_before:
            self._num_before[position] = bisect_left(
                range(len(token_ids)), position, key=lambda count: len(self._tokenizer.decode_reply(token_ids[:count]))
            )
        return self._num_before[position]
