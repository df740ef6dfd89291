"""NgramProposer: drafts from earlier tokens of the sequence (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.sequence import Sequence
from labinfer.engine.spec import EngineSpec

MAX_MATCHES = 16
"""Maximum number of earlier matches of an n-gram to compare, latest first."""


def make_proposer(options: SpeculativeOptions, spec: EngineSpec) -> NgramProposer:
    """Make the proposer of the method ``ngram`` of ``--speculative-config``."""
    return NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)


class NgramProposer:
    """Looks up the last tokens of a sequence in its prompt and answer, and drafts the tokens that followed them there.

    Args:
        least, most: minimum and maximum length of the n-gram; longer matches are preferred.
    """

    def __init__(self, least: int, most: int):
        self._least, self._most = least, most
        self._texts: dict[Sequence, IndexedText] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return [self._text(sequence).continuation(limit) for sequence, limit in zip(sequences, limits, strict=True)]

    def forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._texts.pop(sequence, None)

    def _text(self, sequence: Sequence) -> IndexedText:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = IndexedText(self._least, self._most)
        text.extend(sequence.token_ids, len(sequence.token_ids) - sequence.num_unverified)
        return text


class IndexedText:
    """Tokens, with an index: n-gram of length ``least`` → end of its latest occurrence, linked to earlier occurrences.

    Each token adds one dictionary entry and one list entry. A look-up takes at most ``MAX_MATCHES`` comparisons.
    """

    def __init__(self, least: int, most: int):
        self._least, self._most = least, most
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # by end of an n-gram, the end of its previous occurrence; 0 for none

    def extend(self, token_ids: list[int], num_certain: int) -> None:
        """Set the tokens to ``token_ids``, which begin with the indexed tokens, and index the first ``num_certain`` of them."""
        tokens, last, before, least = token_ids, self._last, self._before, self._least
        for end in range(len(before), num_certain):  # the n-gram that ends with the last token has no continuation yet
            ngram = tuple(tokens[end - least : end]) if end >= least else ()
            before.append(last.get(ngram, 0))
            if ngram:
                last[ngram] = end
        self._tokens = tokens

    def continuation(self, limit: int) -> list[int]:
        """Return ``limit`` tokens that followed the longest earlier match of the last tokens; the latest of equally long ones. Empty without a match.

        If fewer than ``limit`` tokens follow the match, they are repeated.
        """
        tokens, length = self._tokens, len(self._tokens)
        end = self._last.get(tuple(tokens[length - self._least :]), 0) if length >= self._least else 0
        best, most = 0, 0
        for _ in range(MAX_MATCHES):
            if not end or most == self._most:
                break
            if (common := self._common(end, length)) > most:
                best, most = end, common
            end = self._before[end]
        if not best:
            return []
        draft = tokens[best : best + limit]
        while len(draft) < limit:
            draft += draft[: limit - len(draft)]
        return draft

    def _common(self, end: int, length: int) -> int:
        """Length, up to ``most``, of the common suffix of tokens[:end] and tokens[:length]."""
        tokens, count = self._tokens, self._least
        while count < min(self._most, end) and tokens[end - count - 1] == tokens[length - count - 1]:
            count += 1
        return count
