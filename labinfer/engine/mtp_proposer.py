"""MTPProposer: tokens that the model's own MTP layer drafted, which come with the sampled ones."""

from __future__ import annotations

from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.facts import EngineFacts
from labinfer.engine.sequence import Sequence


def make_proposer(options: SpeculativeOptions, facts: EngineFacts) -> MTPProposer:
    """The proposer of the method ``mtp``."""
    return MTPProposer()


class MTPProposer:
    """Gives what the last stage drafted with each sequence's last token; ``Drafts.plan_mtp`` says for how many tokens it is asked."""

    drafts_with_samples = True
    """Drafts are made in the step before the one that verifies them."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Tokens that may follow each sequence's, at most so many."""
        return [list(sequence.mtp_draft[:limit]) for sequence, limit in zip(sequences, limits, strict=True)]

    def forget(self, sequences: list[Sequence]) -> None:
        """Nothing is kept here."""
