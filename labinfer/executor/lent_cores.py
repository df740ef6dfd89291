"""Cores that ranks of a machine lend each other: a stage that waits for another one has no use for its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from labinfer.comm.doorbells import hang_doorbells
from labinfer.functions.provider import Provider
from labinfer.group.rank_group import RankGroup
from labinfer.layout.layout import Layout
from labinfer.spmd.threads import own_cores
from labinfer.spmd.topology import Place

logger = logging.getLogger(__name__)


def share_cores(group: RankGroup, layout: Layout, place: Place, providers: Sequence[Provider]) -> None:
    """Let this rank compute on cores of other stages' ranks while these wait, and them on its own; collective.

    That takes several stages on CPUs of one machine, each rank bound to cores of its own, and shared memory. Elsewhere nothing
    is lent.
    """
    topology, everyone = layout.topology, group.everyone
    here = everyone[group.rank].node
    by_node: dict[str, list[int]] = {}
    for rank in group.ranks:
        by_node.setdefault(everyone[rank].node, []).append(rank)
    lenders = [rank for rank in by_node[here] if topology.place(rank).stage != place.stage]
    may_lend = bool(group.threads.bound_to) and all(layout.devices[rank].type == "cpu" for rank in by_node[here])
    lent: dict[int, int] = {}
    if topology.num_stages > 1:
        comm = group.split([[group.ranks.index(rank) for rank in ranks] for ranks in by_node.values()])
        if all(comm.all_gather_bytes(b"1" if lenders and may_lend else b"")):
            group.progress.doorbells = hang_doorbells(comm, by_node[here], group.rank)
    if (doorbells := group.progress.doorbells) is not None:
        working = [everyone[rank] for rank in group.ranks]
        for rank in lenders:
            cores = own_cores(everyone[rank], working)[: group.threads.count]
            lent |= {core[0]: doorbells.idle_word(rank) for core in cores}
        logger.debug("stages of this machine lend each other their cores while they wait")
    for provider in providers:
        provider.borrow_cores(lent)
