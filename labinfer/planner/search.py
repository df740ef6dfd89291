"""find_layout: the best layout of a model on a cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from labinfer.planner.branch_and_bound import BranchAndBound
from labinfer.planner.cluster import Cluster
from labinfer.planner.max_layers import MaxLayers
from labinfer.planner.objective import Stage, fits, kv_tokens, make_criteria
from labinfer.planner.problem import Problem, Solution
from labinfer.planner.units import FormLevel, choose_units, form_levels

MEMORY_SHARE = 0.9
"""Fraction of the best throughput that a layout for the objective ``memory`` must keep."""


def find_layout(problem: Problem) -> Solution | None:
    """The best layout; None if the model does not fit. Each machine uses the first form (dtype and quantization) of
    ``problem.dtypes`` in which it was probed. If the model then does not fit, as few kinds of machines as possible use the next
    form in the list."""
    problem = replace(problem, cluster=_without(problem.cluster, problem.excluded), excluded=frozenset())
    wants_room = problem.objective == "memory"
    if wants_room:
        problem = replace(problem, objective="throughput")
    max_layers = MaxLayers(problem.limits)
    for level in form_levels(problem.cluster, problem.dtypes):
        best = _find_best(problem, level, max_layers)
        if best is not None:
            return replace(_find_roomiest(problem, best, level, max_layers) if wants_room else best, level=level)
    return None


def _find_best(problem: Problem, level: FormLevel, max_layers: MaxLayers) -> Solution | None:
    best: Solution | None = None
    demand = problem.cache_demand(num_seqs=1)
    for classes in choose_units(problem.cluster, problem.dtypes, level).choices:
        num_layers = len(classes[0].costs.layers)
        most = [max(max_layers.count(each.costs, demand, is_last=last) for last in (False, True)) for each in classes]
        if sum(count * each.count for count, each in zip(most, classes, strict=True)) < num_layers:
            continue  # a cheap check of memory first: there may be hundreds of choices, and a search takes seconds
        best = BranchAndBound(problem=problem, classes=classes, known=best, max_layers=max_layers).run() or best
    return best


def _without(cluster: Cluster, excluded: Collection[str]) -> Cluster:
    machines = [machine for machine in cluster.machines if machine.name not in excluded]
    links = [pair for pair in cluster.links if not {pair.a, pair.b} & set(excluded)]
    return Cluster(machines=machines, links=links, default_link=cluster.default_link)


def _find_roomiest(problem: Problem, fastest: Solution, level: FormLevel, max_layers: MaxLayers) -> Solution:
    """The layout with the most KV tokens among those with at least ``MEMORY_SHARE`` of the throughput of ``fastest``, by bisection
    over KV tokens."""
    best, most = fastest, fastest.value / MEMORY_SHARE
    size = problem.limits.block_size
    low = kv_tokens(fastest.stages, problem.limits) // size
    high = problem.limits.useful_blocks
    while low < high:
        middle = (low + high + 1) // 2
        solution = _find_best(replace(problem, kv_tokens=middle * size), level, max_layers)
        if solution is not None and solution.value <= most:
            best, low = solution, kv_tokens(solution.stages, problem.limits) // size
        else:
            high = middle - 1
    return best


def judge(problem: Problem, stages: Sequence[Stage]) -> Solution | None:
    """The layout ``stages`` with its value at the best numbers of sequences and micro-batches; None if the model does not fit."""
    objective = "throughput" if problem.objective == "memory" else problem.objective
    best = None
    for criterion in make_criteria(objective, problem.request, problem.limits, len(stages)):
        fewest, most = criterion.num_stages
        if fewest <= len(stages) <= most and fits(stages, problem.limits, problem.cache_demand(criterion.num_seqs)):
            value = criterion.evaluate(stages, problem.cluster)
            if best is None or value < best.value:
                best = Solution(value, criterion, tuple(stages))
    return best
