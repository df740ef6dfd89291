"""changed_options: engine options of a served model after a layout change; check_devices: checks that ranks keep their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.devices import DeviceName, machine_names
from labinfer.comm.spmd.machine import RankInfo
from labinfer.launch.layout.layout import Layout
from labinfer.planner.saved_plan import SavedPlan, plan_options
from labinfer.server.link.layout_change import LayoutChange


def changed_options(
    options: EngineOptions, change: LayoutChange, machines: Sequence[str], devices: Sequence[str] = ()
) -> EngineOptions:
    """Engine options of a model after ``change``, with as many KV blocks as fit into memory.

    Args:
        machines: machine of each rank of the launch.
        devices: device of each rank, see ``plan_options``.

    Raises:
        UserError: a field of ``change`` is invalid, or is given together with ``plan``.
    """
    options = replace(options, planned_blocks=0)  # planned for the layout before the change
    parallel, model = options.parallel, options.model
    if change.plan is not None:
        if change.moves or change.dtype is not None or change.quantization is not None:
            raise UserError("plan already determines all other fields; leave them out")
        return plan_options(change.plan, options, machines, devices)
    if change.moves:
        sizes, layers = tuple(change.tensor_parallel_size or (1,)), tuple(change.layers or ())
        num_placed = sum(sizes) if len(sizes) > 1 else sizes[0] * len(layers)
        ranks = tuple(change.ranks or ())
        if not ranks and 0 < num_placed < len(machines):  # by default the ranks in use now, or else the first ones
            ranks = parallel.ranks if len(parallel.ranks) == num_placed else tuple(range(num_placed))
        parallel = replace(
            parallel, tensor_parallel_size=sizes, pipeline_parallel_size=0, layers=layers, ranks=ranks, layout=""
        )
    if change.dtype is not None:
        model = replace(model, dtype=tuple(change.dtype))
    if change.quantization is not None:
        given = change.quantization
        model = replace(model, quantization=(given,) if isinstance(given, str) else tuple(given))
    changed = replace(options, parallel=parallel, model=model)
    changed.check()
    return changed


def kept_machines(
    plan: SavedPlan, options: EngineOptions, devices: Mapping[int, DeviceName], everyone: Sequence[RankInfo]
) -> tuple[list[str], list[str]]:
    """Machine name and device of each rank, with which ``plan_options`` applies ``plan`` so that every rank keeps its
    device.

    Machine names are node names. If the plan has other names, ``machine_names`` gives them. The list of devices is empty if
    ``--device`` has a single value. If ``--device`` has a value per stage, spare ranks get a machine name that no plan has, so that
    the plan does not use them.

    Args:
        options: engine options before the change.
        devices: device of each rank that is not spare.

    Raises:
        UserError: the plan has a stage on a device type that no rank of the node uses.
    """
    machines = nodes = [info.node for info in everyone]
    if any(stage.machine not in nodes for stage in plan.stages):
        machines = machine_names(devices, everyone)
    for stage in plan.stages:
        node, _, device_type = stage.machine.rpartition("/")
        if stage.machine not in machines and node in nodes:
            raise UserError(
                f"plan has a stage on {stage.machine}, but no rank on {node} runs on {device_type}, and a layout change "
                "keeps the device of each rank; start the server again with --layout and the plan"
            )
    if len(options.parallel.device) == 1:
        return machines, []
    names = [str(devices.get(rank, "")) for rank in range(len(everyone))]
    return [machine if name else f"{machine} (spare)" for machine, name in zip(machines, names, strict=True)], names


def check_devices(before: Layout, after: Layout) -> None:
    """Check that every rank has the same device type in the layouts ``before`` and ``after`` a change.

    Raises:
        UserError: a rank would change its device type.
    """
    for rank, device in after.devices.items():
        if (old := before.all_devices.get(rank, device)).type != device.type:
            raise UserError(
                f"plan puts rank {rank} on {device}, but it runs on {old}, and a layout change keeps the device of each "
                "rank; start the server again with --layout and the plan"
            )


def layout_shape(layout: Layout) -> tuple:
    """The values of a layout that a ``LayoutChange`` can change. A change between layouts with equal values is not needed."""
    topology = layout.topology
    return topology.places, topology.layers, layout.dtypes, layout.quantizations
