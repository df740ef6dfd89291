"""Cores that ranks of a machine lend each other: a stage that waits for another one has no use for its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from labinfer.comm.communicator import Communicator
from labinfer.comm.doorbells import Doorbells
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.shared_memory import hang_doorbells
from labinfer.comm.spmd.topology import Place
from labinfer.functions.provider import Provider
from labinfer.launch.layout.layout import Layout
from labinfer.native.compiler import OnProgress

logger = logging.getLogger(__name__)


def share_doorbells(
    group: RankGroup,
    machine: Communicator,
    ranks: Sequence[int],
    on_progress: OnProgress = lambda done, total: None,
) -> Doorbells | None:
    """Hang the bells of this machine's ranks, if they hang nowhere yet, for this rank's waits; collective. None where they cannot.

    For the arguments see ``hang_doorbells``.
    """
    key = tuple(ranks)
    if key not in group.doorbells:
        group.doorbells[key] = hang_doorbells(machine, ranks, group.rank, on_progress)
    group.progress.doorbells = group.doorbells[key]
    return group.progress.doorbells


def share_cores(
    group: RankGroup, machine: Communicator | None, layout: Layout, place: Place, providers: Sequence[Provider]
) -> bool:
    """Let this rank compute on cores of other stages' ranks while these wait, and them on its own; collective. Returns whether all stages of
    the model lend each other theirs, for functions that compute on them.

    That takes several stages on CPUs of one machine, each rank bound to cores of its own, and shared memory. Elsewhere nothing
    is lent.

    Args:
        machine: the placed ranks of this one's machine, in the order of their numbers; None where there is one stage.
    """
    everyone, topology = group.everyone, layout.topology
    ranks = [rank for rank in group.ranks if everyone[rank].node == everyone[group.rank].node]
    lent: dict[int, int] = {}
    stages: set[int] = set()
    if machine is not None:
        bound_to = set(group.threads.bound_to)  # not the cores of a rank that drafts, which is not in this group
        cores = [core[0] for core in everyone[group.rank].cores if bound_to.issuperset(core)]
        may_lend = layout.devices[group.rank].type == "cpu"
        offers = machine.all_gather_bytes(msgspec.msgpack.encode(cores[: group.threads.count] if may_lend else []))
        cpus = dict(zip(ranks, (msgspec.msgpack.decode(offer, type=list[int]) for offer in offers), strict=True))
        stages = {topology.place(rank).stage for rank in ranks}
        if len(stages) > 1 and all(cpus.values()):
            bells = share_doorbells(group, machine, ranks)
            if bells is not None:
                others = (rank for rank in ranks if topology.place(rank).stage != place.stage)
                words = bells.idle_words()
                lent = {cpu: words[rank] for rank in others for cpu in cpus[rank]}
                group.progress.lends_cores = True
                logger.debug("stages of this machine lend each other their cores while they wait")
    for provider in providers:
        provider.borrow_cores(lent)
    return bool(lent) and len(stages) == topology.num_stages
