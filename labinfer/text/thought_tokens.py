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
        self._decoder = tokenizer.reply_decoder()
        self._ends = [0]  # characters of the reply that are complete after each number of tokens

    def count(self, parser: ReplyParser, token_ids: list[int]) -> int:
        """Number of tokens in thoughts.

        Args:
            parser: one that was fed with the answer's text.
            token_ids: the answer's tokens; with each call those of the call before and further ones.
        """
        for token_id in token_ids[len(self._ends) - 1 :]:
            self._ends.append(self._ends[-1] + len(self._decoder.add(token_id)))
        return sum(
            self._count_to(end, len(token_ids)) - self._count_to(begin, len(token_ids))
            for begin, end in parser.thoughts
        )

    def _count_to(self, position: int | None, num_tokens: int) -> int:
        return num_tokens if position is None else min(num_tokens, bisect_left(self._ends, position))
