"""Core sharing: which CPUs a rank uses, and who frees them. Ranks are threads."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.progress import Progress
from labinfer.comm.spmd.devices import DeviceName
from labinfer.comm.spmd.machine import RankInfo
from labinfer.comm.spmd.threads import ThreadChoice, choose_threads
from labinfer.comm.spmd.topology import Topology
from labinfer.launch import core_sharing
from labinfer.launch.core_sharing import share_cores


class Compiled:
    """A compiled library that remembers the cores of its last call."""

    def use_idle_cores(self, cores, count) -> None:
        self.cores = {core.cpu: core.is_idle for core in cores}
        assert len(self.cores) == count.value


def rank_info(rank: int, *, node: str = "a", cores: int = 4) -> RankInfo:
    """A rank on so many cores with two CPUs each, as others of its node are."""
    return RankInfo(
        rank=rank,
        local_rank=rank,
        node=node,
        cores=[[core, core + 100] for core in range(cores)],
        num_cpus=2 * cores,
        cpu_limit=2.0 * cores,
        accelerator="",
        num_accelerators=0,
        torch_version="2",
    )


def used_cores(
    tp_sizes: tuple[int, ...],
    everyone: list[RankInfo],
    *,
    threads: int = 0,
    devices: dict[int, str] | None = None,
    unbound: tuple[int, ...] = (),
    drafting: tuple[RankInfo, ...] = (),
    compiles: bool = True,
) -> list[dict[int, int]]:
    """By rank of the first one's machine: the CPUs that it uses, each with the rank that frees it while it waits."""
    topology = Topology(tp_sizes, ((0, 1),) * len(tp_sizes))
    layout = SimpleNamespace(
        topology=topology,
        devices={info.rank: DeviceName((devices or {}).get(info.rank, "cpu")) for info in everyone},
    )

    def work(comm):
        rank, library = comm.rank, Compiled()
        choice = choose_threads(everyone[rank], [*everyone, *drafting], threads, 0, False)
        if rank in unbound:
            choice = ThreadChoice(choice.count, choice.reason)
        group = SimpleNamespace(
            rank=rank,
            ranks=tuple(info.rank for info in everyone),
            everyone=everyone,
            threads=choice,
            progress=Progress(),
        )
        machine = comm if len(tp_sizes) > 1 else None
        provider = SimpleNamespace(compiled=lambda: library if compiles else None)
        providers = [SimpleNamespace(compiled=object), provider]  # a plugin's library exports other functions
        share_cores(group, machine, layout, topology.place(rank), providers)
        flags = group.progress.on_wait
        share_cores(group, machine, layout, topology.place(rank), providers)
        assert group.progress.on_wait is flags, "a further model of these ranks needs no further memory"
        if rank == 0:  # a layout of one stage, in which the others are spare ranks
            share_cores(group, None, layout, topology.place(rank), providers)
        share_cores(group, machine, layout, topology.place(rank), providers)
        if not compiles:
            assert group.progress.on_wait is None
            return {}
        assert (group.progress.on_wait is None) == (library.cores == {})
        owners = {}
        for waiting in range(comm.size):
            comm.barrier()
            if waiting == rank:
                with group.progress.waiting("something"):
                    comm.barrier()
                    comm.barrier()
            else:
                comm.barrier()
                idle = {cpu for cpu, address in library.cores.items() if ctypes.c_uint32.from_address(address).value}
                owners |= dict.fromkeys(idle, waiting)
                comm.barrier()
        assert owners.keys() == library.cores.keys()
        return owners

    return LocalCommunicator.run(sum(info.node == everyone[0].node for info in everyone), work)


def test_stages_use_the_cores_that_each_others_threads_are_bound_to():
    everyone = [rank_info(rank) for rank in range(2)]
    assert used_cores((1, 1), everyone) == [{2: 1, 3: 1}, {0: 0, 1: 0}]
    assert used_cores((1, 1), everyone, threads=1) == [{2: 1}, {0: 0}]


def test_stages_use_no_cores_of_a_rank_that_drafts_beside_them():
    everyone = [rank_info(rank, cores=6) for rank in range(3)]
    assert used_cores((1, 1), everyone[:2], drafting=(everyone[2],)) == [{2: 1, 3: 1}, {0: 0, 1: 0}]


def test_ranks_of_one_stage_share_no_cores():
    everyone = [rank_info(rank) for rank in range(3)]
    assert used_cores((1, 2), everyone, threads=1) == [{2: 1, 3: 2}, {0: 0}, {0: 0}]


def test_cores_of_other_machines_are_not_used():
    everyone = [rank_info(0, cores=2), rank_info(1, cores=2), rank_info(2, node="b", cores=2)]
    assert used_cores((1, 1, 1), everyone) == [{1: 1}, {0: 0}]


@pytest.mark.parametrize(
    "options",
    [{"devices": {1: "cuda"}}, {"unbound": (0,)}, {"threads": 3}, {"compiles": False}],
    ids=["one rank on an accelerator", "one rank not bound", "more threads than cores", "no compiled functions"],
)
def test_no_cores_are_shared_if_one_rank_cannot(options):
    assert used_cores((1, 1), [rank_info(rank) for rank in range(2)], **options) == [{}] * 2


def test_no_cores_are_shared_within_one_stage(monkeypatch):
    monkeypatch.setattr(core_sharing, "share_segment", lambda *_: pytest.fail("there is nobody to share with"))
    assert used_cores((2,), [rank_info(rank) for rank in range(2)]) == [{}] * 2
    everyone = [rank_info(0), rank_info(1), rank_info(2, node="b")]
    assert used_cores((2, 1), everyone) == [{}] * 2  # the other stage is on another machine


def test_no_cores_are_shared_without_shared_memory(monkeypatch):
    monkeypatch.setattr(core_sharing, "share_segment", lambda *_: "no memory")
    assert used_cores((1, 1), [rank_info(rank) for rank in range(2)]) == [{}] * 2
