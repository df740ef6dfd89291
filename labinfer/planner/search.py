"""find_layout: the best layout of a model on a cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from labinfer.planner.class_search import ClassSearch
from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import Stage, fits, kv_tokens, make_criteria
from labinfer.planner.problem import Problem, Solution
from labinfer.planner.units import choose_units

MEMORY_SHARE = 0.9
"""Part of the best throughput that a layout with the most KV tokens must keep."""


def find_layout(problem: Problem) -> Solution | None:
    """The best layout; None where the model does not fit."""
    if problem.objective == "memory":
        return _find_roomiest(problem)
    best: Solution | None = None
    for classes in choose_units(_without(problem.cluster, problem.excluded), problem.dtypes).choices:
        solution = ClassSearch(problem=problem, classes=classes, known=best).run()
        best = solution or best
    return best


def _without(cluster: Cluster, excluded: Collection[str]) -> Cluster:
    machines = [machine for machine in cluster.machines if machine.name not in excluded]
    links = [pair for pair in cluster.links if not {pair.a, pair.b} & set(excluded)]
    return Cluster(machines=machines, links=links, default_link=cluster.default_link)


def _find_roomiest(problem: Problem) -> Solution | None:
    """The layout with the most KV tokens among those with nearly the best throughput, by bisection over its tokens."""
    problem = replace(problem, objective="throughput")
    best = fastest = find_layout(problem)
    if fastest is None:
        return None
    most = fastest.value / MEMORY_SHARE
    size = problem.limits.block_size
    low = kv_tokens(fastest.stages, problem.limits) // size
    high = problem.limits.max_num_seqs * -(-problem.limits.max_model_len // size)
    while low < high:
        middle = (low + high + 1) // 2
        solution = find_layout(replace(problem, kv_tokens=middle * size))
        if solution is not None and solution.value <= most:
            best, low = solution, kv_tokens(solution.stages, problem.limits) // size
        else:
            high = middle - 1
    return best


def judge(problem: Problem, stages: Sequence[Stage]) -> Solution | None:
    """The value of a given layout, with as many sequences and micro-batches as suit it; None where the model does not fit."""
    objective = "throughput" if problem.objective == "memory" else problem.objective
    best = None
    for criterion in make_criteria(objective, problem.request, problem.limits, len(stages)):
        fewest, most = criterion.num_stages
        if fewest <= len(stages) <= most and fits(stages, problem.limits, problem.least_room(criterion.num_seqs)):
            value = criterion.evaluate(stages, problem.cluster)
            if best is None or value < best.value:
                best = Solution(value, criterion, tuple(stages))
    return best
