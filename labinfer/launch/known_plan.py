"""find_plan: the best plan for machines that have measured, or the one that was found for them before."""

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
"""Part by which the free memory of a machine may differ from what it was when a plan was found."""


class KnownPlan(msgspec.Struct, frozen=True):
    """A plan in a file."""

    plan: SavedPlan
    memory: dict[str, int]
    """Bytes that were free for each rank, by machine."""
    losses: dict[str, str] = {}
    """See ``PlanReport.describe_losses``."""
    alternatives: str = ""
    """See ``PlanReport.describe_alternatives``; empty where nobody has asked for them."""


def find_plan(problem: Problem, folder: Path | None, *, explains: bool = False) -> tuple[SavedPlan, str]:
    """The best plan, and its report. Searching takes long for many machines with many tensor-parallel degrees, and each start would
    search again; the room for a cache is counted again each time.

    Args:
        folder: where plans are remembered.
        explains: whether to have the report, too, which is empty otherwise.

    Raises:
        UserError: the model does not fit, or there are too many machines.
    """
    cluster = problem.cluster
    memory = {machine.name: min(costs.memory for costs in machine.costs) for machine in cluster.machines}
    path = folder / f"plan-{_circumstances(problem)}.json" if folder is not None else None
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
