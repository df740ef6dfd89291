"""MTPProposer: drafts of the model's own MTP layer, which arrive with the sampled tokens."""

from __future__ import annotations

from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.sequence import Sequence
from labinfer.engine.spec import EngineSpec


def make_proposer(options: SpeculativeOptions, spec: EngineSpec) -> MTPProposer:
    """Make the proposer of the method ``mtp`` of ``--speculative-config``."""
    return MTPProposer()


class MTPProposer:
    """Returns the draft that the last stage sent with each sequence's last token. ``Drafts.propose`` chooses its length."""

    drafts_with_samples = True
    """Whether drafts arrive together with the sampled tokens of a step, to be verified in the next step."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """The first ``limits[i]`` tokens of the draft of ``sequences[i]``."""
        return [list(sequence.mtp_draft[:limit]) for sequence, limit in zip(sequences, limits, strict=True)]

    def forget(self, sequences: list[Sequence]) -> None:
        """Do nothing: no state is kept."""
