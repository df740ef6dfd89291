"""find_plan: the best plan for measured machines, cached in a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

import labinfer
from labinfer import planner
from labinfer.launch.measure.cost_file import read_costs, write_costs
from labinfer.native.cache_file import digest
from labinfer.planner.cluster import Cluster
from labinfer.planner.make_problem import no_room
from labinfer.planner.problem import Problem
from labinfer.planner.report import PlanReport, describe_stages
from labinfer.planner.saved_plan import SavedPlan
from labinfer.planner.search import find_layout, judge

MEMORY_MARGIN = 0.1
"""Relative change of a machine's free memory up to which a cached plan is reused."""


class KnownPlan(msgspec.Struct, frozen=True):
    """Cached plan and the free memory that it was found for."""

    plan: SavedPlan
    memory: dict[str, int]
    """Free bytes for each rank, by machine name."""
    losses: dict[str, str] = {}
    """Losses by machine, as texts; see ``PlanReport.describe_losses``."""
    alternatives: str = ""
    """Table of alternatives to the plan; see ``PlanReport.describe_alternatives``; empty if not requested."""


def find_plan(problem: Problem, folder: Path | None, *, explains: bool = False) -> tuple[SavedPlan, str]:
    """Best plan and its report, from the cache if possible: a search is slow with many machines and tensor-parallel degrees. The KV
    capacity is recomputed on each call.

    Args:
        folder: folder of cached plans; None disables the cache.
        explains: whether to make the report; otherwise the report is empty.

    Raises:
        UserError: the model does not fit, or there are too many machines.
    """
    cluster = problem.cluster
    memory = {machine.name: min(costs.memory for costs in machine.costs) for machine in cluster.machines}
    path = folder / f"plan-{_cache_key(problem)}.json" if folder is not None else None
    known = read_costs(path, KnownPlan)
    solution = None
    if known is not None and _is_near(known.memory, memory) and (known.alternatives or not explains):
        stages = known.plan.stages_on(cluster)
        solution = judge(problem, stages) if stages is not None else None
    if solution is None:
        losses, alternatives = {}, ""
        if explains:
            report = PlanReport.make(problem)
            solution, losses, alternatives = report.best, report.describe_losses(), report.describe_alternatives()
        elif (solution := find_layout(problem)) is None:
            raise no_room(problem)
        known = KnownPlan(SavedPlan.make(solution.stages, problem), memory, losses, alternatives)
        write_costs(path, known)
    plan = SavedPlan.make(solution.stages, problem)
    return plan, f"{describe_stages(problem, solution, known.losses)}\n{known.alternatives}" if explains else ""


def _cache_key(problem: Problem) -> str:
    """Digest of everything that a plan depends on except free memory, which differs at each start."""
    machines = [
        msgspec.structs.replace(machine, costs=[msgspec.structs.replace(costs, memory=0) for costs in machine.costs])
        for machine in problem.cluster.machines
    ]
    cluster = Cluster(machines=machines, links=problem.cluster.links, default_link=problem.cluster.default_link)
    code = sorted((path.name, path.stat().st_mtime_ns) for path in Path(planner.__file__).parent.glob("*.py"))
    return digest(labinfer.__version__, code, dataclasses.replace(problem, cluster=cluster))


def _is_near(memory: dict[str, int], now: dict[str, int]) -> bool:
    return memory.keys() == now.keys() and all(
        abs(now[name] - bytes_then) <= MEMORY_MARGIN * bytes_then for name, bytes_then in memory.items()
    )
