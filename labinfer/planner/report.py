"""PlanReport: the best layout and its alternatives, as text and as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from labinfer.base.option_fields import join
from labinfer.comm.spmd.topology import shard_range
from labinfer.observe.table import format_bytes, format_seconds, format_table
from labinfer.planner.costs import HostCosts
from labinfer.planner.make_problem import no_room
from labinfer.planner.objective import Stage, kv_blocks
from labinfer.planner.problem import Problem, Solution
from labinfer.planner.saved_plan import SavedPlan, merge_equal, rounding
from labinfer.planner.search import find_layout, judge
from labinfer.planner.units import allowed_forms, choose_units, form_levels

HEADER = ("machine", "memory", "layers", "tp", "dtype", "KV tokens", "busy", "if removed")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The best layout, compared with other layouts."""

    problem: Problem
    best: Solution
    even: Solution | None
    """Layout of a launch without layout flags: one stage per rank with equal layer counts. None if it does not fit, or no costs
    with tp_size 1 are known."""
    alone: Mapping[str, Solution]
    """The best layout on each single machine on which the model fits."""
    without: Mapping[str, Solution | None]
    """For each machine of the best layout except the required first one: the best layout without it; None if the model
    does not fit."""
    left_out: Mapping[str, Solution | None]
    """For each machine that the best layout does not use: the best layout that includes it; None if there is none."""
    num_unseen: int = 0
    """Number of ways to divide the cluster into units that the search left out; see ``UnitChoices.num_left_out``."""

    @classmethod
    def make(cls, problem: Problem) -> PlanReport:
        """The best layout and its alternatives.

        Raises:
            UserError: the model does not fit, or there are too many machines.
        """
        best = find_layout(problem)
        if best is None:
            raise no_room(problem)
        levels = [level for level in form_levels(problem.cluster, problem.dtypes) if level <= best.level]
        names = [machine.name for machine in problem.cluster.machines]
        used = best.machines
        alone = {name: find_layout(replace(problem, excluded=frozenset(names) - {name}, first="")) for name in names}
        return cls(
            problem=problem,
            best=best,
            even=_split_evenly(problem),
            num_unseen=sum(choose_units(problem.cluster, problem.dtypes, level).num_left_out for level in levels),
            alone={name: solution for name, solution in alone.items() if solution is not None},
            without={
                name: find_layout(replace(problem, excluded=frozenset({name})))
                for name in used
                if name != problem.first and len(names) > 1
            },
            left_out={
                name: find_layout(replace(problem, required=frozenset({name}))) for name in names if name not in used
            },
        )

    def describe(self, path: str = "") -> str:
        """A table of the stages, and lines about the alternatives.

        Args:
            path: file that the plan is saved to, if any.
        """
        return f"{describe_stages(self.problem, self.best, self.describe_losses())}\n{self.describe_alternatives(path)}"

    def describe_alternatives(self, path: str = "") -> str:
        """Lines about other layouts, and the flags that launch the best one. For ``path`` see ``describe``."""
        best, lines = self.best, []
        if self.even is not None and self.even.stages != best.stages:
            lines.append(f"even split: {self._describe_value(self.even)}")
        if self.alone:
            name, solution = min(self.alone.items(), key=lambda item: item[1].value)
            if len(best.stages) > 1:
                lines.append(f"{name} alone: {self._describe_value(solution)}")
        lines += self._describe_replicas()
        for name, solution in self.left_out.items():
            text = "the model does not fit" if solution is None else self._describe_value(solution)
            lines.append(f"{name} is not used; with it: {text}")
        if self.num_unseen:
            lines.append(
                f"combinations of tensor-parallel sizes and precisions not searched: {self.num_unseen} (one may be "
                "faster); use fewer machines, or fewer tensor-parallel sizes per cluster file"
            )
        if not all(stage.costs.measured for stage in best.stages):
            lines.append("some costs are estimated, not measured")
        sizes = [stage.end - stage.begin for stage in best.stages]
        order = ", ".join(stage.machine for stage in best.stages)
        flags = (
            f"-tp {','.join(str(stage.costs.tp_size) for stage in best.stages)} --layers {','.join(map(str, sizes))}"
        )
        flags += f" --dtype {','.join(stage.costs.dtype for stage in best.stages)}"
        quantizations = merge_equal(tuple(rounding(stage.costs.quantization) for stage in best.stages))
        flags += f" -q {join(quantizations)}" * (quantizations not in (("none",), ("auto",)))
        flags = f"--layout {path}, or with {flags}" if path else flags
        lines.append(f"start with {flags}; rank 0 on {best.stages[0].machine}, order of the stages: {order}")
        return "\n".join(lines)

    def save(self) -> bytes:
        """The plan as JSON."""
        plan = SavedPlan.make(self.best.stages, self.problem)
        return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"

    def _describe_value(self, solution: Solution) -> str:
        others = _forms(solution) - _forms(self.best)  # dtypes and quantizations that the best layout does not use
        form = f", in {' and '.join(sorted(others))}" if others else ""
        return f"{_describe_value(self.problem, solution)}{form}"

    def describe_losses(self) -> dict[str, str]:
        """Change of throughput (or of the time per answer) without each machine in use, as a text by machine."""
        return {name: self._describe_loss(name) for name in self.best.machines}

    def _describe_loss(self, machine: str) -> str:
        if machine not in self.without:
            return "-"
        other = self.without[machine]
        if other is None:
            return "does not fit"
        if self.best.criterion.adds:
            return f"{100 * (other.value / self.best.value - 1):+.0f} % time"
        return f"{100 * (self.best.value / other.value - 1):+.0f} %"

    def _describe_replicas(self) -> list[str]:
        """A line if separate servers, each with the whole model, have more throughput than the best layout."""
        if self.best.criterion.adds or len(self.alone) < 2:
            return []
        rate = sum(self.problem.request.output / solution.value for solution in self.alone.values())
        if rate <= self.problem.request.output / self.best.value:
            return []
        return [f"separate servers on {', '.join(self.alone)}, behind a proxy: {rate:.4g} tokens/s in total"]


def describe_stages(problem: Problem, solution: Solution, losses: Mapping[str, str]) -> str:
    """A table of the stages, and lines with the speed and the KV tokens.

    Args:
        losses: see ``PlanReport.describe_losses``.
    """
    blocks, rows = kv_blocks(solution.stages, problem.limits), []
    for number, stage in enumerate(solution.stages):
        costs = stage.costs
        busy = solution.criterion.busy_share(solution.stages, number, solution.value)
        rows.append(
            (
                stage.machine,
                format_bytes(costs.memory),
                f"{stage.begin}-{stage.end - 1}",
                costs.tp_size,
                costs.dtype + f", {costs.quantization}" * (costs.quantization != "none"),
                blocks.of_rank[number] * problem.limits.block_size,
                f"{100 * busy:.0f} %",
                losses[stage.machine],
            )
        )
    tokens = blocks.num_blocks * problem.limits.block_size
    lines = [format_table(HEADER, rows), "", f"predicted: {_describe_value(problem, solution)}", f"KV tokens: {tokens}"]
    return "\n".join(lines)


def _describe_value(problem: Problem, solution: Solution) -> str:
    if solution.criterion.adds:
        return f"{format_seconds(solution.value)} per request"
    rate, criterion = problem.request.output / solution.value, solution.criterion
    batches = f"{criterion.num_batches} micro-batch{'es' * (criterion.num_batches != 1)}"
    sequences = f"{criterion.num_seqs} sequence{'s' * (criterion.num_seqs != 1)}"
    return f"{rate:.4g} tokens/s with {sequences} running in {batches}"


def _forms(solution: Solution) -> set[str]:
    """Dtype and quantization of the stages of ``solution``, each pair as text: ``dtype (quantization)``."""
    return {f"{stage.costs.dtype} ({stage.costs.quantization})" for stage in solution.stages}


def _split_evenly(problem: Problem) -> Solution | None:
    """Layout of a launch without layout flags on all ranks, numbered machine by machine; None if there is none."""
    machines = sorted(problem.cluster.machines, key=lambda machine: machine.name != problem.first)
    ranks: list[tuple[str, HostCosts]] = []
    for machine in machines:
        forms = allowed_forms(machine, problem.dtypes)
        costs = next((costs for costs in forms[0] if costs.tp_size == 1), None) if forms else None
        if costs is None:
            return None
        ranks += [(machine.name, costs)] * machine.ranks
    num_layers = len(ranks[0][1].layers)
    if len(ranks) > num_layers:
        return None
    bounds = shard_range(num_layers, len(ranks))
    stages = [
        Stage(machine=name, costs=costs, begin=begin, end=end)
        for (name, costs), (begin, end) in zip(ranks, bounds, strict=True)
    ]
    return judge(problem, stages)
