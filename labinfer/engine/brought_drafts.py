"""BroughtDrafts: tokens that the model's own MTP layer guessed, which come with the sampled ones."""

from __future__ import annotations

from labinfer.engine.sequence import Sequence


class BroughtDrafts:
    """Gives what the last stage guessed with each sequence's last token; ``Drafts.ask`` says for how many tokens it is asked."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Tokens that may follow each sequence's, at most so many."""
        return [list(sequence.brought_draft[:limit]) for sequence, limit in zip(sequences, limits, strict=True)]

    def forget(self, sequences: list[Sequence]) -> None:
        """Nothing is kept here."""
