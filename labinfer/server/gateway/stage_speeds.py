"""find_stage_speeds: mean step time of each stage over a period."""

from __future__ import annotations

from labinfer.server.gateway.cluster_answers import StageSpeed
from labinfer.server.link.stats import EngineStats


def find_stage_speeds(first: EngineStats, last: EngineStats) -> list[StageSpeed]:
    """Mean step time of each stage's slowest rank between the stats ``first`` and ``last`` of an engine. Stages without
    steps are left out."""
    before = {rank.rank: rank for rank in first.ranks}
    factors = last.drift.factors if last.drift is not None else []
    slowest: dict[int, StageSpeed] = {}
    for rank in last.ranks:
        earlier = before.get(rank.rank)
        steps = rank.num_steps - (earlier.num_steps if earlier else 0)
        busy = rank.busy_seconds - (earlier.busy_seconds if earlier else 0.0)
        if steps < 1:
            continue
        slowdown = factors[rank.stage] if rank.stage < len(factors) else None
        predicted = busy / steps / slowdown if slowdown else None
        speed = StageSpeed(rank.stage, rank.rank, busy / steps, predicted, slowdown)
        if rank.stage not in slowest or speed.step_seconds > slowest[rank.stage].step_seconds:
            slowest[rank.stage] = speed
    return [slowest[stage] for stage in sorted(slowest)]
