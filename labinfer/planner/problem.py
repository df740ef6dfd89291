"""Problem and Solution: a question to the search, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import Criterion, EngineLimits, Room, Stage
from labinfer.planner.units import FIRST_FORMS, FormLevel
from labinfer.planner.workload import MeanRequest


@dataclass(frozen=True)
class Solution:
    """A layout, the criterion for which it is best, and its value."""

    value: float
    criterion: Criterion
    stages: tuple[Stage, ...]
    level: FormLevel = FIRST_FORMS
    """Level of the forms among which it is the best."""

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(stage.machine for stage in self.stages))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question to the search."""

    cluster: Cluster
    request: MeanRequest
    limits: EngineLimits
    objective: str = "throughput"
    first: str = ""
    """Machine of the first stage, where rank 0 is; empty for any."""
    required: frozenset[str] = frozenset()
    """Machines that must have a stage."""
    excluded: frozenset[str] = frozenset()
    """Machines that must have none."""
    dtypes: tuple[tuple[str, str], ...] = ()
    """See ``choose_units``."""
    kv_tokens: float = 0
    """Least room for KV tokens, beside that of the longest request and of the sequences at once."""
    options: tuple[tuple[str, str], ...] = ()
    """Options on which the room for a cache depends; see ``room_options``."""

    def least_room(self, num_seqs: int) -> Room:
        """Room that every stage must have for so many sequences at once: also for one as long as requests may be."""
        tokens = max(self.limits.max_model_len, num_seqs * self.request.decode_context, self.kv_tokens)
        return Room(tokens, num_seqs)
