"""Communicators of a model, one for each purpose: stage, activations, results, control, drafts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labinfer.base.plan import Command, DraftAnswer, DraftCommand
from labinfer.base.rank_stats import WorkerStats
from labinfer.comm.communicator import Communicator, name_ranks
from labinfer.comm.control import ControlChannel
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.pipeline import PipelineCommunicator
from labinfer.comm.routed import RoutedCommunicator
from labinfer.comm.shared_memory import share_memory
from labinfer.comm.shared_memory_ring import share_rings
from labinfer.comm.spmd.command_senders import command_senders
from labinfer.comm.spmd.machine import RankInfo
from labinfer.comm.spmd.topology import Place
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.launch.layout.layout import Layout
from labinfer.launch.providers import collectives_backend
from labinfer.observe.progress_line import compile_progress

logger = logging.getLogger(__name__)

HOST_TRANSPORTS = ("gloo", "mpi", "local")
"""Names of transports that move tensors through host memory."""


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """Communicators of a model, one for each purpose."""

    placed: RankGroup
    """Group of the placed ranks (those with a part of the model)."""
    stage: Communicator
    """Ranks of this rank's stage (TP group); this rank alone on a spare rank."""
    stage_host: Communicator | None
    """Ranks of ``stage``, for tensors in host memory. None if ``stage`` itself sends from host memory."""
    activations: Communicator | None
    results: Communicator | None
    """Sends sampled results from the sampling rank to rank 0. ``activations`` and ``results`` are None with one stage."""
    machine: Communicator | None
    """Placed ranks of this rank's machine; this rank alone on a spare rank. None with one stage."""
    channel: ControlChannel | None
    """Control channel of rank 0. None on a spare rank whose first model owns the channel."""
    drafts: ControlChannel | None
    """Channel between rank 0 and the spare rank with the draft model; None without such a rank."""


def make_communicators(
    group: RankGroup,
    layout: Layout,
    channel: ControlChannel | None = None,
    *,
    shares_channel: bool = False,
    may_share: bool,
) -> Communicators:
    """Make the communicators of a model. Collective over all ranks, spare ranks included, as ``torch.distributed`` requires.

    See ``build_rank`` for ``channel`` and ``shares_channel``, and ``connect`` for ``may_share``."""
    topology, everyone = layout.topology, range(group.size)
    placed = topology.placed_ranks
    stages = [topology.stage_ranks(stage) for stage in range(topology.num_stages)]
    spare = [(rank,) for rank in everyone if rank not in placed]
    carriers = [layout.carrier(ranks, group.everyone) for ranks in stages]
    has_pipeline = topology.num_stages > 1
    by_machine: dict[str, list[int]] = {}
    for rank in sorted(placed):
        by_machine.setdefault(group.everyone[rank].node, []).append(rank)
    machine = group.split([*by_machine.values(), *spare])
    comms = [group.split([everyone]) for _ in range((not shares_channel) + has_pipeline)]
    if has_pipeline:
        comms.append(_make_activations(group, direct_links(layout, group.everyone)))
    drafts = None
    if layout.draft_devices:
        senders = dict.fromkeys(layout.draft_devices, 0)
        drafts = ControlChannel(group.split([everyone]), DraftCommand, DraftAnswer, senders)
    placed_group = group.only(placed) if spare else group
    backends = [*map(collectives_backend, carriers), *("" for _ in spare)]
    stage, stage_host = group.split([*stages, *spare], backends), None
    if any(name != "cpu" for name in carriers):
        stage_host = group.split([*stages, *spare])
        if group.rank not in placed or carriers[topology.place(group.rank).stage] == "cpu":
            stage_host = None
    _log_accelerators(group, layout, stage)
    if may_share and group.rank in placed:  # last, so that a rank that must compile delays only its own machine
        comms = _share_messages(group, layout, machine, by_machine[group.everyone[group.rank].node], comms)
    activations, results = (comms.pop(), comms.pop()) if has_pipeline else (None, None)
    if not shares_channel:
        channel = ControlChannel(comms.pop(), Command, WorkerStats, command_senders(topology.command_order))
    return Communicators(
        placed=placed_group,
        stage=stage,
        stage_host=stage_host,
        activations=activations,
        results=results,
        machine=machine if has_pipeline else None,
        channel=channel,
        drafts=drafts,
    )


def _log_accelerators(group: RankGroup, layout: Layout, stage: Communicator) -> None:
    """Log on rank 0 which ranks share an accelerator, and what the all-reduces of stages on accelerators use. Collective over all ranks."""
    libraries, sharing = group.gather_bytes(stage.name.encode()), defaultdict(list)
    if group.rank > 0:
        return
    for rank, device in layout.devices.items():
        if device.type != "cpu":
            sharing[layout.memory(rank, group.everyone)].append(rank)
    for ranks in sharing.values():
        if len(ranks) > 1:
            logger.warning(
                "%s share %s on %s: each has a part of its memory, and their tensors go through host memory; start one rank per accelerator",
                name_ranks(ranks),
                layout.devices[ranks[0]],
                group.everyone[ranks[0]].node,
            )
    for number in range(layout.topology.num_stages):
        ranks = layout.topology.stage_ranks(number)
        if len(ranks) > 1 and layout.devices[ranks[0]].type != "cpu":
            library = libraries[ranks[0]].decode()
            how = f"go through host memory ({library})" if library in HOST_TRANSPORTS else f"use {library}"
            logger.info("stage %d: all-reduces of %s %s", number, name_ranks(ranks), how)


def direct_links(layout: Layout, everyone: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Ranks that send activations directly from accelerator to accelerator, by device type.

    A library such as NCCL connects accelerators of one type with one rank each, so of the ranks that share an accelerator only the first
    uses it.
    """
    topology, first_rank, ranks = layout.topology, {}, defaultdict(set)
    for rank in topology.placed_ranks:
        first_rank.setdefault(layout.memory(rank, everyone), rank)
    alone = set(first_rank.values())
    for place in topology.places:
        if (source := topology.activation_source(place)) is None or not alone.issuperset((source, place.rank)):
            continue
        if (name := layout.carrier((source, place.rank), everyone)) != "cpu":
            ranks[name] |= {source, place.rank}
    return {name: sorted(numbers) for name, numbers in ranks.items()}


def _make_activations(group: RankGroup, links: Mapping[str, Sequence[int]]) -> Communicator:
    """Communicator of all ranks for activations. Collective over all ranks.

    Args:
        links: see ``direct_links``.
    """
    everyone, groups = range(group.size), list(links.values())
    backends = list(map(collectives_backend, links))
    if any(len(ranks) == group.size for ranks in groups):
        return group.split(groups, backends)
    host = group.split([everyone])
    if not links:
        return host
    others = [rank for rank in everyone if all(rank not in ranks for ranks in groups)]
    direct = group.split([*groups, others], [*backends, ""]) if others else group.split(groups, backends)
    ranks = next((ranks for ranks in groups if group.rank in ranks), None)
    return host if ranks is None else RoutedCommunicator(host, direct, ranks)


def _share_messages(
    group: RankGroup, layout: Layout, machine: Communicator, ranks: Sequence[int], comms: list[Communicator]
) -> list[Communicator]:
    """Send messages between ranks of this machine through shared memory, if all ranks of the machine compute on CPUs; collective over ``ranks``.

    Args:
        ranks: placed ranks of the machine.
    """
    if not comms or len(ranks) < 2 or any(layout.devices[rank].type != "cpu" for rank in ranks):
        return comms
    with compile_progress() as on_progress:
        return share_rings(machine, comms, ranks, on_progress)


def connect(
    comms: Communicators, layout: Layout, place: Place, *, may_share: bool
) -> tuple[TensorParallelCommunicator, PipelineCommunicator | None]:
    """Make the communicators of one rank: tensor parallel within its stage, and pipeline (None with one stage). Collective over the stage.

    Args:
        may_share: whether the ranks of a stage on CPUs may exchange tensors through shared memory.
    """
    topology, stage = layout.topology, comms.stage
    if may_share and all(layout.devices[rank].type == "cpu" for rank in topology.stage_ranks(place.stage)):
        with compile_progress() as on_progress:
            stage = share_memory(stage, on_progress)
    tp = TensorParallelCommunicator(stage, comms.stage_host)
    if comms.activations is None:
        return tp, None
    pipeline = PipelineCommunicator(
        comms.activations,
        comms.results,
        source=topology.activation_source(place),
        destinations=topology.activation_destinations(place),
        sampling_rank=topology.sampling_rank,
        labels={each.rank: str(each) for each in topology.places},
    )
    return tp, pipeline
