"""SavedPlan: the file format of a plan, and the engine options that run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.option_fields import flag_name, join
from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import Stage, kv_blocks
from labinfer.planner.problem import Problem

MAX_STAGES = 4096
MAX_OPTIONS = 256
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
ROUNDINGS = ("int8", "int4")
"""Values of --quantization that quantize weights on load. Other values of ``HostCosts.quantization`` name formats of
checkpoints that are already quantized."""
ROOM_OPTIONS = (
    *("functions", "autotune", "reproducible", "weights", "quantization_group_size", "sliding_window"),
    *("experts", "device"),
    *("block_size", "num_kv_blocks", "kv_cache_dtype", "swap_space", "expert_offload", "memory_utilization"),
    *("max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "preemption_mode", "context_shift", "keep"),
    "speculative_config",
)
"""Engine options that, together with ``max_model_len`` and the layout in the plan, determine the KV cache capacity."""


class SavedStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage in the file that ``plan --save`` writes."""

    machine: str
    layers: Count
    tp_size: Count
    dtype: str
    quantization: str


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The file of ``launch.py plan --auto --save``, which ``--layout`` reads."""

    model: str
    """Digest of the model's shapes; see ``HostCosts.model``."""
    stages: Annotated[list[SavedStage], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    """Stages in pipeline order; rank 0 is on the machine of the first stage."""
    block_size: int = 0
    """Tokens of a KV block."""
    num_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    """KV blocks of a launch with ``options``; 0 if the file does not say."""
    options: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_OPTIONS)] = {}
    """Engine options, as text, for which ``num_blocks`` holds; see ``room_options``."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit in the KV cache of a launch with ``options``."""
        return self.num_blocks * self.block_size

    @classmethod
    def make(cls, stages: Sequence[Stage], problem: Problem) -> SavedPlan:
        """The plan of a layout found for ``problem``."""
        saved = [
            SavedStage(
                machine=stage.machine,
                layers=stage.end - stage.begin,
                tp_size=stage.costs.tp_size,
                dtype=stage.costs.dtype,
                quantization=stage.costs.quantization,
            )
            for stage in stages
        ]
        return cls(
            model=stages[0].costs.model,
            stages=saved,
            block_size=problem.limits.block_size,
            num_blocks=kv_blocks(stages, problem.limits).num_blocks,
            options=dict(problem.options),
        )

    def stages_on(self, cluster: Cluster) -> list[Stage] | None:
        """The stages with the costs of ``cluster``; None if ``cluster`` lacks costs that a stage needs, or has another number of
        layers."""
        costs = {
            (machine.name, each.tp_size, each.dtype, each.quantization): each
            for machine in cluster.machines
            for each in machine.costs
        }
        stages, begin = [], 0
        for stage in self.stages:
            own = costs.get((stage.machine, stage.tp_size, stage.dtype, stage.quantization))
            if own is None or begin + stage.layers > len(own.layers):
                return None
            stages.append(Stage(machine=stage.machine, costs=own, begin=begin, end=begin + stage.layers))
            begin += stage.layers
        return stages if begin == len(stages[0].costs.layers) else None

    @classmethod
    def read(cls, path: str) -> SavedPlan:
        """The plan in a file.

        Raises:
            UserError: the file cannot be read, or holds no plan.
        """
        hint = "create it with launch.py plan --auto --save"
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise UserError(f"cannot read --layout {path}: {error.strerror}; {hint}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"--layout {path} is not a plan: {error}; {hint}") from None


def plan_options(
    plan: SavedPlan, options: EngineOptions, nodes: Sequence[str], devices: Sequence[str] = ()
) -> EngineOptions:
    """Engine options with the layout, dtypes and quantizations of ``plan``; equal on all ranks.

    Args:
        options: source of all other options.
        nodes: machine of each rank.
        devices: device of each rank, such as ``npu:0``, if ``--device`` of ``options`` has one value per rank; empty to keep ``--device``.

    Raises:
        UserError: the plan does not match the machines ``nodes``, or the resulting options are invalid.
    """
    ranks, dtypes = place_stages(plan, nodes), tuple(stage.dtype for stage in plan.stages)
    quantizations = tuple(rounding(stage.quantization) for stage in plan.stages)
    of_stage, used = [], 0
    for stage in plan.stages if devices else ():
        name = devices[ranks[used]]
        of_stage.append(name if stage.tp_size == 1 else name.partition(":")[0])
        used += stage.tp_size
    chosen = replace(
        options,
        model=replace(options.model, dtype=merge_equal(dtypes), quantization=merge_equal(quantizations)),
        parallel=replace(
            options.parallel,
            tensor_parallel_size=tuple(stage.tp_size for stage in plan.stages),
            pipeline_parallel_size=len(plan.stages),
            layers=tuple(stage.layers for stage in plan.stages),
            ranks=() if ranks == tuple(range(len(nodes))) else ranks,
            device=merge_equal(tuple(of_stage)) or options.parallel.device,
            layout="",
        ),
    )
    chosen.check()
    return chosen


def room_options(options: EngineOptions, context: int) -> dict[str, str]:
    """Options that determine the KV cache capacity: ``ROOM_OPTIONS`` and ``max_model_len`` with their values as text.

    Args:
        context: longest context of the launch, in tokens.
    """
    values = {"max_model_len": str(context)}
    for section in (*options.weight_options, options.cache, options.scheduler):
        values |= {f.name: _text(getattr(section, f.name)) for f in fields(section) if f.name in ROOM_OPTIONS}
    return values | {"block_size": str(options.cache.tokens_per_block)}


def describe_difference(plan: SavedPlan, options: Mapping[str, str]) -> str:
    """Text that names the options of a launch that differ from ``plan.options``, for which ``plan.num_blocks`` holds; empty if none
    differ.

    Args:
        options: options of the launch; see ``room_options``.
    """
    names = [name for name in {**plan.options, **options} if plan.options.get(name) != options.get(name)]
    return "; ".join(
        f"{flag_name(name)} {plan.options.get(name, 'not given')} in the plan, {options.get(name, 'not given')} here"
        for name in names
    )


def place_stages(plan: SavedPlan, nodes: Sequence[str]) -> tuple[int, ...]:
    """The ranks of all stages in turn: each stage takes the lowest free ranks of its machine. For the arguments see
    ``plan_options``.

    Raises:
        UserError: a machine is missing or has too few ranks, or rank 0 is not on the machine of the first stage.
    """
    free: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        free.setdefault(node, []).append(rank)
    needed = Counter[str]()
    for stage in plan.stages:
        needed[stage.machine] += stage.tp_size
    for machine, count in needed.items():
        if machine not in free:
            raise UserError(
                f"the plan has a stage on {machine}, but ranks run only on {', '.join(free)}; start {count} there, "
                "or make a new plan"
            )
        if len(free[machine]) < count:
            raise UserError(
                f"the plan needs {count} ranks on {machine}, which has {len(free[machine])}; start {count} there, "
                "or make a new plan"
            )
    if nodes[0] != (first := plan.stages[0].machine):
        raise UserError(
            f"the plan has the first stage on {first}, but rank 0 is on {nodes[0]}; start rank 0 on {first}"
        )
    return tuple(free[stage.machine].pop(0) for stage in plan.stages for _ in range(stage.tp_size))


def describe_plan(plan: SavedPlan, nodes: Sequence[str]) -> str:
    """Layers and ranks of each stage, and the spare ranks, in one line."""
    placed, parts, begin = place_stages(plan, nodes), [], 0
    ranks = iter(placed)
    for stage in plan.stages:
        own = [next(ranks) for _ in range(stage.tp_size)]
        parts.append(f"layers {begin}-{begin + stage.layers - 1} on {stage.machine} ({_name_ranks(own)})")
        begin += stage.layers
    spare = [rank for rank in range(len(nodes)) if rank not in placed]
    return ", ".join(parts) + (f"; spare: {_name_ranks(spare)}" if spare else "")


def rounding(name: str) -> str:
    """The --quantization value that gives ``name``, a value of ``HostCosts.quantization``."""
    if name == "none":
        return name
    last = name.rpartition(" + ")[2]
    return last if last in ROUNDINGS else "auto"


def merge_equal(values: tuple[str, ...]) -> tuple[str, ...]:
    """One value if all of ``values`` (one per stage) are equal; else ``values``."""
    return values[:1] if len(set(values)) == 1 else values


def _text(value: Any) -> str:
    if is_dataclass(value):
        return msgspec.json.encode(value).decode()
    return join(value) if isinstance(value, tuple) else str(value)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
