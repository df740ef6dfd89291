"""DraftFigures: acceptance and cost of drafted tokens (speculative decoding), from the counters of a scheduler."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from labinfer.observe.table import format_seconds


@dataclass(frozen=True, kw_only=True)
class DraftFigures:
    """Counts and times of speculative decoding in a run. Times are in seconds."""

    drafts: int
    """Number of verified drafts. A draft is for one sequence and one step."""
    continued: int
    """Number of drafts that continued an earlier draft of their sequence, before the earlier draft was verified."""
    drafted: int
    accepted: int
    drafted_by_place: list[int]
    """Number of drafted tokens at each position in a draft. Tokens after a rejected token count as rejected."""
    accepted_by_place: list[int]
    draft_seconds: float
    """Time in which the drafter ran, and rank 0 waited for it."""
    saved_seconds: float
    """Estimated time of the steps that accepted tokens made unnecessary, minus the time of drafting and verifying. 0 if no step
    times were measured at startup."""
    failures: int

    @classmethod
    def read(cls, counts: Counter[str]) -> DraftFigures:
        """Read the figures from the counters ``engine.drafts.Drafts.counts``."""
        places = list(itertools.takewhile(lambda place: counts[f"drafted_{place}"], itertools.count()))
        return cls(
            drafts=counts["drafts"],
            continued=counts["continued"],
            drafted=counts["drafted"],
            accepted=counts["accepted"],
            drafted_by_place=[counts[f"drafted_{place}"] for place in places],
            accepted_by_place=[counts[f"accepted_{place}"] for place in places],
            draft_seconds=counts["draft_seconds"],
            saved_seconds=counts["saved_seconds"],
            failures=counts["drafter_failures"],
        )

    def acceptance(self) -> list[float]:
        """Fraction of accepted tokens at each position in a draft."""
        return [right / all_ for right, all_ in zip(self.accepted_by_place, self.drafted_by_place, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """Mean number of output tokens per verified draft: the accepted tokens, and one sampled token unless another draft
        continued the draft."""
        return (self.drafts - self.continued + self.accepted) / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict:
        """The figures as values of a JSON object."""
        return {
            "drafts": self.drafts,
            "continued": self.continued,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_by_place": [round(share, 4) for share in self.acceptance()],
            "tokens_per_step": round(self.tokens_per_step, 4),
            "draft_s": round(self.draft_seconds, 4),
            "saved_s": round(self.saved_seconds, 4),
            "failures": self.failures,
        }

    def describe(self) -> str:
        """One line of text with the figures."""
        text = "no tokens were drafted"
        if self.drafts:
            shares = " ".join(f"{100 * share:.0f}" for share in self.acceptance())
            text = (
                f"{self.accepted} of {self.drafted} accepted ({100 * self.accepted / self.drafted:.1f} %; by draft "
                f"position {shares} %), {self.tokens_per_step:.2f} tokens per step with drafts; drafting took "
                f"{format_seconds(self.draft_seconds)}"
            )
            if self.continued:
                text += f"; {self.continued} of {self.drafts} drafts continued an unverified one"
            if self.saved_seconds > 0:
                text += f"; saved about {format_seconds(self.saved_seconds)}"
        return text + ("; the drafter failed, see the log" if self.failures else "")
