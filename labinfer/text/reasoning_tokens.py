"""ReasoningTokens: counts the reasoning tokens of an answer."""

from __future__ import annotations

from bisect import bisect_left

from labinfer.text.reply_parser import ReplyParser
from labinfer.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts the reasoning tokens of one answer, delimiters included.

    A token counts as reasoning if its last character belongs to the reasoning. Each token is decoded once, so that the
    tokens of a growing answer can be counted repeatedly.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decoder = tokenizer.reply_decoder()
        self._ends = [0]  # complete characters of the reply after each number of tokens

    def count(self, parser: ReplyParser, token_ids: list[int]) -> int:
        """Number of reasoning tokens among ``token_ids``.

        Args:
            parser: parser that has parsed the answer's text so far.
            token_ids: all tokens of the answer so far.
        """
        for token_id in token_ids[len(self._ends) - 1 :]:
            self._ends.append(self._ends[-1] + len(self._decoder.add(token_id)))
        return sum(
            self._count_to(end, len(token_ids)) - self._count_to(begin, len(token_ids))
            for begin, end in parser.reasoning_spans
        )

    def _count_to(self, position: int | None, num_tokens: int) -> int:
        return num_tokens if position is None else min(num_tokens, bisect_left(self._ends, position))
