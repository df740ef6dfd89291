"""Core sharing: while a rank waits, ranks of other stages on its machine compute on its cores."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import msgspec

from labinfer.comm.communicator import Communicator
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.shared_memory import SharedSegment, share_segment
from labinfer.comm.spmd.topology import Place
from labinfer.functions.provider import Provider
from labinfer.launch.layout.layout import Layout
from labinfer.native.compiler import NoCompiler

logger = logging.getLogger(__name__)

FLAG_BYTES = 128
"""Distance in bytes between two idle flags: two cache lines, against false sharing."""


class IdleFlags:
    """Idle flag of each rank in ``ranks``: 1 while the rank waits. Calling the object sets the flag of ``own_rank``.

    Helper threads may read the flags at any time, so the memory is never unmapped. Later models of the same ranks reuse it.
    """

    def __init__(self, segment: SharedSegment, ranks: Sequence[int], own_rank: int):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(segment.memory))
        self.ranks = ranks
        self._flags = {
            rank: ctypes.c_uint32.from_buffer(segment.memory, i * FLAG_BYTES) for i, rank in enumerate(ranks)
        }
        self._own = self._flags[own_rank]

    def __call__(self, is_waiting: bool) -> None:
        self._own.value = is_waiting

    def address(self, rank: int) -> int:
        return ctypes.addressof(self._flags[rank])


class CoreOffer(msgspec.Struct, frozen=True):
    """Tells the other ranks of the machine which CPU cores of this rank they may use while it is idle."""

    cpus: list[int]
    """One CPU of each core that the rank shares; empty if it shares none."""
    has_flags: bool
    """Whether the rank already has ``IdleFlags`` for these ranks, from an earlier model."""


class SharedCore(ctypes.Structure):
    """CPU core of another rank, which this process may use while that rank is idle. The C++ struct in ``thread_pool.h``
    has equal fields."""

    _fields_ = [("is_idle", ctypes.c_void_p), ("cpu", ctypes.c_int64)]


def share_cores(
    group: RankGroup, machine: Communicator | None, layout: Layout, place: Place, providers: Sequence[Provider]
) -> None:
    """Let compiled functions of this rank use idle cores of other stages' ranks, and the reverse; collective over ``machine``.

    Requires several stages on CPUs of one machine, compiled functions, shared memory, and ranks that are bound to distinct cores.
    Replaces the setup of an earlier call.

    Args:
        machine: ranks of the model on this machine, ascending; None if there is one stage.
    """
    libraries = (provider.compiled() for provider in providers)
    compiled = next((library for library in libraries if hasattr(library, "use_idle_cores")), None)
    cores: list[SharedCore] = []
    if machine is None:
        group.progress.on_wait = None
    else:
        cores = _exchange_cores(group, machine, layout, place, compiled)
    if compiled is not None:
        compiled.use_idle_cores((SharedCore * len(cores))(*cores), ctypes.c_int64(len(cores)))


def _exchange_cores(
    group: RankGroup, machine: Communicator, layout: Layout, place: Place, compiled: ctypes.CDLL | None
) -> list[SharedCore]:
    """Cores of the other stages' ranks, with their idle flags; empty if any rank of the machine cannot share cores. Sets this rank's ``on_wait``."""
    flags, group.progress.on_wait = group.progress.on_wait, None
    everyone, topology = group.everyone, layout.topology
    ranks = [rank for rank in group.ranks if everyone[rank].node == everyone[group.rank].node]
    bound_to = set(group.threads.bound_to)  # without the cores of a draft rank, which is not in this group
    own = [core[0] for core in everyone[group.rank].cores if bound_to.issuperset(core)][: group.threads.count]
    offer = own if layout.devices[group.rank].type == "cpu" else []
    has_flags = isinstance(flags, IdleFlags) and flags.ranks == ranks  # from an earlier model
    data = machine.all_gather_bytes(msgspec.msgpack.encode(CoreOffer(offer, has_flags)))
    offers = [msgspec.msgpack.decode(each, type=CoreOffer) for each in data]
    cpus = {rank: offer.cpus for rank, offer in zip(ranks, offers, strict=True)}
    if len({topology.place(rank).stage for rank in ranks}) == 1 or not all(cpus.values()):
        return []

    def load() -> ctypes.CDLL:
        if compiled is None:
            raise NoCompiler("no compiled kernels")
        return compiled

    if not all(offer.has_flags for offer in offers):
        shared = share_segment(machine, len(ranks) * FLAG_BYTES, load)
        if not isinstance(shared, SharedSegment):
            logger.debug("core sharing between the stages of this machine is off: %s", shared)
            return []
        flags = IdleFlags(shared, ranks, group.rank)
    group.progress.on_wait = flags
    logger.debug("core sharing is on: stages of this machine use each other's idle cores")
    others = (rank for rank in ranks if topology.place(rank).stage != place.stage)
    return [SharedCore(flags.address(rank), cpu) for rank in others for cpu in cpus[rank]]
