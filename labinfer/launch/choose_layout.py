"""choose_layout: engine options with the layout that ``--layout`` names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from labinfer.base.config import AUTO_LAYOUT, EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.group.rank_group import RankGroup
from labinfer.launch.find_model import find_model
from labinfer.launch.tune import cache_folder
from labinfer.models.config import ModelConfig

if TYPE_CHECKING:
    from labinfer.planner.cluster import Cluster, MachinePairLink
    from labinfer.planner.saved_plan import SavedPlan

logger = logging.getLogger(__name__)


def choose_layout(
    group: RankGroup,
    options: EngineOptions,
    on_progress: Callable[[str], None] = lambda text: None,
    on_report: Callable[[str, Sequence[MachinePairLink]], None] | None = None,
) -> EngineOptions:
    """Engine options with the layout of ``--layout`` applied; collective. Without ``--layout`` they are unchanged.

    Rank 0 reads the plan from a file, or makes it from measurements of all machines, and broadcasts it. The cores of each
    machine are divided among its ranks that work (``working_ranks``).

    Args:
        on_progress: called with a text that names the current measurement.
        on_report: called on rank 0 with the report of a plan that was made (a table of it and its alternatives, which takes further
            searches), and with the links between machines.

    Raises:
        CollectiveError: the plan cannot be read, is for another model or other machines, or no plan exists.
    """
    layout = options.parallel.layout
    is_auto = layout == AUTO_LAYOUT
    if not layout or (is_auto and group.size == 1):
        return dataclasses.replace(options, parallel=dataclasses.replace(options.parallel, layout=""))
    if is_auto:
        from labinfer.planner.make_problem import refuse_draft_rank

        with group.raise_on_all_ranks():
            refuse_draft_rank(options, f"--layout {AUTO_LAYOUT}")
    from labinfer.launch.measure.probe import probe_cluster
    from labinfer.launch.measure.probe_layout import model_name, name_machines
    from labinfer.planner.saved_plan import SavedPlan, describe_difference, describe_plan, plan_options, room_options

    _, config = find_model(group, options)
    nodes, devices, data = [info.node for info in group.everyone], [], b""
    cluster = probe_cluster(group, options, on_progress, for_plan=True) if is_auto else None
    if is_auto:
        on_progress("done; searching for the best layout")
    with group.raise_on_all_ranks(), _named(layout):
        if is_auto:
            nodes, devices = name_machines(options, group.everyone)
        if group.rank == 0:
            plan = (
                SavedPlan.read(layout) if cluster is None else _find_plan(cluster, options, config, nodes[0], on_report)
            )
            data = msgspec.msgpack.encode(plan)
    plan = msgspec.msgpack.decode(group.comm.all_gather_bytes(data)[0], type=SavedPlan)
    with group.raise_on_all_ranks(), _named(layout):
        if plan.model != (model := model_name(config)):
            raise UserError(
                f"the plan is for another model ({plan.model}) than --model {options.model.model} ({model}); make "
                "a new plan"
            )
        if any(stage.machine not in nodes for stage in plan.stages):
            nodes, devices = name_machines(options, group.everyone)
        chosen = plan_options(plan, options, nodes, devices)
        chosen.check_group_size()
    if is_auto:  # keep the measured model options, so that later starts compute an equal digest of them
        chosen = dataclasses.replace(chosen, model=options.model)
    group.take_cores(chosen.working_ranks, options.runtime.threads)
    own = room_options(options, options.model.max_model_len or config.exact_context or config.max_position)
    # If the user changed an option that the KV capacity depends on, ignore the plan's block count and use all free memory.
    difference = describe_difference(plan, own)
    if group.rank == 0:
        logger.info("--layout %s: %s", layout, describe_plan(plan, nodes))
        if plan.num_blocks and not difference:
            logger.info("--layout %s: KV cache capacity %d tokens", layout, plan.num_tokens)
        elif plan.num_blocks:
            logger.info(
                "--layout %s: the plan's %d KV cache tokens do not apply, as options differ from the plan; using "
                "all memory: %s",
                layout,
                plan.num_tokens,
                difference,
            )
    return dataclasses.replace(chosen, planned_blocks=0 if difference else plan.num_blocks)


def _find_plan(
    cluster: Cluster,
    options: EngineOptions,
    config: ModelConfig,
    first: str,
    on_report: Callable[[str, Sequence[MachinePairLink]], None] | None,
) -> SavedPlan:
    """Best plan whose first stage is on machine ``first``.

    Raises:
        UserError: see ``find_plan``.
    """
    from labinfer.launch.known_plan import find_plan
    from labinfer.planner.make_problem import make_problem

    problem = make_problem(cluster, options, first=first, max_position=config.exact_context or config.max_position)
    plan, report = find_plan(problem, cache_folder(), explains=on_report is not None)
    if on_report is not None:
        on_report(report, cluster.links)
    return plan


@contextmanager
def _named(layout: str) -> Iterator[None]:
    """Prefix errors of the block with ``--layout`` and its value ``layout``.

    Raises:
        UserError: the block raises one; the text is prefixed.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(text if "--layout" in text else f"--layout {layout}: {text}") from None
