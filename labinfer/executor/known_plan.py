"""find_plan: the best plan for machines that have measured, or the one that was found for them before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

import labinfer
from labinfer import planner
from labinfer.executor.cost_file import read_costs, write_costs
from labinfer.planner.cluster import Cluster
from labinfer.planner.make_problem import no_room
from labinfer.planner.problem import Problem
from labinfer.planner.report import PlanReport
from labinfer.planner.saved_plan import SavedPlan
from labinfer.planner.search import find_layout, judge
from labinfer.weights.weight_cache import digest

MEMORY_MARGIN = 0.1
"""Part by which the free memory of a machine may differ from what it was when a plan was found."""


class KnownPlan(msgspec.Struct, frozen=True):
    """A plan in a file."""

    plan: SavedPlan
    memory: dict[str, int]
    """Bytes that were free for each rank, by machine."""
    report: str = ""
    """The plan beside its alternatives, as a table; empty where nobody has asked for them."""


def find_plan(problem: Problem, folder: Path | None, *, explains: bool = False) -> KnownPlan:
    """The best plan. Searching takes long for many machines with many tensor-parallel degrees, and each start would search again.

    Args:
        folder: where plans are remembered.
        explains: whether to have the report, too.

    Raises:
        UserError: the model does not fit, or there are too many machines.
    """
    cluster = problem.cluster
    memory = {machine.name: min(costs.memory for costs in machine.costs) for machine in cluster.machines}
    path = folder / f"plan-{_circumstances(problem)}.json" if folder is not None else None
    known = read_costs(path, KnownPlan)
    if known is not None and _is_near(known.memory, memory) and (known.report or not explains):
        stages = known.plan.stages_on(cluster)
        if stages is not None and judge(problem, stages) is not None:
            return known
    if explains:
        report = PlanReport.make(problem)
        known = KnownPlan(SavedPlan.make(report.best.stages), memory, report.describe())
    elif (solution := find_layout(problem)) is not None:
        known = KnownPlan(SavedPlan.make(solution.stages), memory)
    else:
        raise no_room(problem)
    write_costs(path, known)
    return known


def _circumstances(problem: Problem) -> str:
    """Digest of all that a plan depends on, but memory, of which hardly ever as much is free as before."""
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
