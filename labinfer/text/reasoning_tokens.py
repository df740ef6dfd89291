"""ReasoningTokens: counts the tokens of an answer that are reasoning."""

from __future__ import annotations

from bisect import bisect_left

from labinfer.text.reply_parser import ReplyParser
from labinfer.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts the tokens of one answer that are reasoning or its delimiters.

    A token counts as reasoning if its last character belongs to the reasoning. While the answer grows, its tokens can be counted
    again and again: each token is decoded only once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decoder = tokenizer.reply_decoder()
        self._ends = [0]  # number of complete characters of the reply after each token

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
