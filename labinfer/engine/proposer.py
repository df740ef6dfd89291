"""Proposer: guesses the next tokens of sequences, which the model then verifies several at once."""

from __future__ import annotations

from typing import Protocol

from labinfer.engine.sequence import Sequence


class Proposer(Protocol):
    """Speculates on sequences that decode (Leviathan et al. 2023, arXiv:2211.17192).

    A guess costs time if it is wrong, and never changes an answer: a drafted token counts only where the same one is
    sampled. Tokens that are drafted and on their way are among the sequence's, as if they were right (``Sequence.num_assumed``): they
    may be other ones at the next call. One that only hands on what came with the sampled tokens has ``drafts_with_samples = True``.
    """

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """For each sequence tokens that may follow its own; none where there is no good guess.

        Args:
            limits: the most tokens that are of use, for each sequence; at least 1.
        """
        ...

    def forget(self, sequences: list[Sequence]) -> None:
        """Forget sequences that have ended. It may be that nothing was asked about them."""
        ...
