"""``EnergyFigures``: energy of a run, in all, per output token and per request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from labinfer.base.rank_stats import WorkerStats


@dataclass(frozen=True, kw_only=True)
class EnergyFigures:
    """Energy of a run in joules."""

    by_rank: dict[int, dict[str, float]]
    """Maps each rank that reads energy counters to the joules of each counter, by name. Only one rank reads a counter."""
    missing: dict[str, list[int]]
    """Maps each reason why energy counters cannot be read to the ranks that report it."""
    output_tokens: int
    requests: int

    @classmethod
    def read(cls, workers: Iterable[WorkerStats], output_tokens: int, requests: int) -> EnergyFigures:
        """Read the figures from the statistics of all ranks at the end of a run."""
        missing = defaultdict(list)
        by_rank = {}
        for worker in workers:
            if worker.energy:
                by_rank[worker.rank] = worker.energy
            for reason in worker.energy_missing:
                missing[reason].append(worker.rank)
        return cls(by_rank=by_rank, missing=dict(missing), output_tokens=output_tokens, requests=requests)

    @property
    def total(self) -> float | None:
        """Total energy in joules, over all ranks; None if no counter can be read."""
        return sum(sum(counters.values()) for counters in self.by_rank.values()) if self.by_rank else None

    @property
    def per_output_token(self) -> float | None:
        """Joules per output token; None if no energy was measured or no tokens were generated."""
        return self.total / self.output_tokens if self.by_rank and self.output_tokens else None

    @property
    def per_request(self) -> float | None:
        """Joules per finished request; None if no energy was measured or no request has finished."""
        return self.total / self.requests if self.by_rank and self.requests else None

    def as_dict(self) -> dict:
        """The figures as values of a JSON object. A figure that was not measured is null, not 0."""
        return {
            "joules": _rounded(self.total),
            "joules_per_output_token": _rounded(self.per_output_token),
            "joules_per_request": _rounded(self.per_request),
            "ranks": {
                str(rank): {name: _rounded(joules) for name, joules in counters.items()}
                for rank, counters in self.by_rank.items()
            },
            "not_measured": self._reasons(),
        }

    def describe(self) -> str:
        """One line of text with the figures; empty if no rank reports any, as in a simulation."""
        parts = []
        if self.by_rank:
            parts.append(f"{self.total:.1f} J")
            if self.output_tokens:
                parts.append(f"{self.per_output_token:.3g} J per output token")
            if self.requests:
                parts.append(f"{self.per_request:.3g} J per request")
            parts += [
                f"rank {rank} " + " + ".join(f"{name} {joules:.1f} J" for name, joules in counters.items())
                for rank, counters in self.by_rank.items()
            ]
        if self.missing:
            parts.append(f"not measured ({'; '.join(self._reasons())})")
        return ", ".join(parts)

    def _reasons(self) -> list[str]:
        return [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {reason}"
            for reason, ranks in self.missing.items()
        ]


def _rounded(joules: float | None) -> float | None:
    return None if joules is None else round(joules, 4)
