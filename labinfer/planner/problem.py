"""Problem and Solution: input and output of the layout search."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import CacheDemand, Criterion, EngineLimits, Stage
from labinfer.planner.units import FIRST_FORMS, FormLevel
from labinfer.planner.workload import MeanRequest


@dataclass(frozen=True)
class Solution:
    """A layout, its value (lower is better, see ``Criterion``), and the criterion that gives this value."""

    value: float
    criterion: Criterion
    stages: tuple[Stage, ...]
    level: FormLevel = FIRST_FORMS
    """Distance of the layout from the preferred dtypes and quantizations."""

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(stage.machine for stage in self.stages))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Input of the layout search."""

    cluster: Cluster
    request: MeanRequest
    limits: EngineLimits
    objective: str = "throughput"
    first: str = ""
    """Machine that must run the first stage and with it rank 0; empty for any."""
    required: frozenset[str] = frozenset()
    """Machines that must have a stage."""
    excluded: frozenset[str] = frozenset()
    """Machines that must not have a stage."""
    dtypes: tuple[tuple[str, str], ...] = ()
    """Allowed pairs of dtype and quantization, in order of preference; empty for any. See ``choose_units``."""
    kv_tokens: float = 0
    """Minimum number of KV tokens of a layout; the longest request and the concurrent sequences may require more."""
    options: tuple[tuple[str, str], ...] = ()
    """Engine options that determine the KV cache capacity; see ``room_options``."""

    def cache_demand(self, num_seqs: int) -> CacheDemand:
        """Cache capacity that every stage needs for ``num_seqs`` concurrent sequences, and for one request of ``max_model_len`` tokens."""
        tokens = max(self.limits.max_model_len, num_seqs * self.request.decode_context, self.kv_tokens)
        return CacheDemand(tokens, num_seqs)
