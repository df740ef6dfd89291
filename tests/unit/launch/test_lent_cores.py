"""Who lends cores to whom: ranks on threads, with bells that are only numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.machine import RankInfo
from labinfer.comm.spmd.threads import ThreadChoice, choose_threads
from labinfer.comm.spmd.topology import Topology
from labinfer.launch import lent_cores
from labinfer.launch.lent_cores import share_cores


class Bells:
    """The word of a rank is its number and 1000."""

    def idle_words(self) -> dict[int, int]:
        return {rank: 1000 + rank for rank in range(8)}


@dataclass
class Borrower:
    """A provider that remembers what it was lent."""

    lent: list[dict[int, int]] = field(default_factory=list)

    def borrow_cores(self, lent: dict[int, int]) -> None:
        self.lent.append(lent)


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


def lent_cpus(
    tp_sizes: tuple[int, ...],
    everyone: list[RankInfo],
    *,
    threads: int = 0,
    devices: dict[int, str] | None = None,
    unbound: tuple[int, ...] = (),
    drafting: tuple[RankInfo, ...] = (),
) -> list[tuple[dict[int, int], object]]:
    """What each rank of the first one's machine borrows, with its words, and its doorbells."""
    topology = Topology(tp_sizes, ((0, 1),) * len(tp_sizes))
    layout = SimpleNamespace(
        topology=topology,
        devices={info.rank: torch.device((devices or {}).get(info.rank, "cpu")) for info in everyone},
    )

    def work(comm):
        rank, provider = comm.rank, Borrower()
        choice = choose_threads(everyone[rank], [*everyone, *drafting], threads, 0, False)
        if rank in unbound:
            choice = ThreadChoice(choice.count, choice.reason)
        progress = SimpleNamespace(doorbells=None, lends_cores=False)
        group = SimpleNamespace(
            rank=rank,
            ranks=tuple(info.rank for info in everyone),
            everyone=everyone,
            threads=choice,
            progress=progress,
            doorbells={},
        )
        machine = comm if len(tp_sizes) > 1 else None
        all_lend = share_cores(group, machine, layout, topology.place(rank), [provider])
        assert all_lend == (bool(provider.lent[0]) and len({info.node for info in everyone}) == 1)
        assert len(provider.lent) == 1
        assert progress.lends_cores == bool(provider.lent[0])
        return provider.lent[0], progress.doorbells

    return LocalCommunicator.run(sum(info.node == everyone[0].node for info in everyone), work)


@pytest.fixture
def bells(monkeypatch):
    shared = Bells()
    monkeypatch.setattr(lent_cores, "hang_doorbells", lambda comm, ranks, rank, on_progress: shared)
    return shared


def test_stages_lend_each_other_the_cores_that_their_threads_are_on(bells):
    everyone = [rank_info(rank) for rank in range(2)]
    assert lent_cpus((1, 1), everyone) == [({2: 1001, 3: 1001}, bells), ({0: 1000, 1: 1000}, bells)]
    assert lent_cpus((1, 1), everyone, threads=1) == [({2: 1001}, bells), ({0: 1000}, bells)]


def test_stages_lend_no_cores_of_a_rank_that_drafts_beside_them(bells):
    everyone = [rank_info(rank, cores=6) for rank in range(3)]
    assert lent_cpus((1, 1), everyone[:2], drafting=(everyone[2],)) == [
        ({2: 1001, 3: 1001}, bells),
        ({0: 1000, 1: 1000}, bells),
    ]


def test_ranks_of_the_same_stage_lend_each_other_nothing(bells):
    everyone = [rank_info(rank) for rank in range(3)]
    borrowed = [lent for lent, _ in lent_cpus((1, 2), everyone, threads=1)]
    assert borrowed == [{2: 1001, 3: 1002}, {0: 1000}, {0: 1000}]


def test_cores_of_other_machines_are_not_lent(bells):
    everyone = [rank_info(0, cores=2), rank_info(1, cores=2), rank_info(2, node="b", cores=2)]
    assert lent_cpus((1, 1, 1), everyone) == [({1: 1001}, bells), ({0: 1000}, bells)]


@pytest.mark.parametrize(
    "options",
    [{"devices": {1: "cuda"}}, {"unbound": (0,)}, {"threads": 3}],
    ids=["one rank on an accelerator", "one rank not bound", "more threads than cores"],
)
def test_nobody_lends_where_one_rank_cannot(bells, options):
    assert lent_cpus((1, 1), [rank_info(rank) for rank in range(2)], **options) == [({}, None)] * 2


def test_nothing_is_lent_within_one_stage(monkeypatch):
    monkeypatch.setattr(lent_cores, "hang_doorbells", lambda *_: pytest.fail("there is nobody to lend to"))
    assert lent_cpus((2,), [rank_info(rank) for rank in range(2)]) == [({}, None)] * 2
    everyone = [rank_info(0), rank_info(1), rank_info(2, node="b")]
    assert lent_cpus((2, 1), everyone) == [({}, None)] * 2  # the other stage is on another machine


def test_nothing_is_lent_without_shared_memory(monkeypatch):
    monkeypatch.setattr(lent_cores, "hang_doorbells", lambda comm, ranks, rank, on_progress: None)
    assert lent_cpus((1, 1), [rank_info(rank) for rank in range(2)]) == [({}, None)] * 2
