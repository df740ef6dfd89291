"""Refusals that all ranks hear of, however long one of them takes."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace

import msgspec
import pytest
import torch

from labinfer.base.config import EngineOptions, RuntimeOptions
from labinfer.base.errors import CollectiveError, UserError, WaitTimeout
from labinfer.comm.group import rank_group
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.health_channel import FaultOptions
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.environment import detect
from labinfer.comm.spmd.machine import describe_rank
from labinfer.comm.spmd.threads import ThreadChoice


def group_of(comm: LocalCommunicator) -> RankGroup:
    everyone = [describe_rank(rank, rank, f"node-{rank}") for rank in range(comm.size)]
    return RankGroup(
        environment=detect({}),
        comm=comm,
        ranks=tuple(range(comm.size)),
        progress=comm.progress,
        health_channel=None,
        everyone=everyone,
        threads=ThreadChoice(1, "test"),
    )


def test_refusal_of_one_rank_is_raised_on_all():
    def work(comm):
        with pytest.raises(CollectiveError) as caught, group_of(comm).raise_on_all_ranks():
            if comm.rank == 1:
                raise UserError("no such file")
        return str(caught.value)

    assert LocalCommunicator.run(3, work) == ["rank 1 on node-1: no such file"] * 3


def test_text_that_is_no_unicode_gets_through():
    def work(comm):
        with pytest.raises(CollectiveError, match=r"\\udcff"), group_of(comm).raise_on_all_ranks():
            raise UserError("no such file \udcff")

    LocalCommunicator.run(2, work)


def test_rank_that_takes_longer_than_the_timeout_is_waited_for():
    def work(comm):
        group = group_of(comm)
        with group.raise_on_all_ranks():
            if comm.rank == 1:
                time.sleep(0.5)  # a download
        assert comm.progress.timeout == 0.2
        if comm.rank == 0:
            with pytest.raises(WaitTimeout):
                comm.irecv(torch.empty(1), 1).wait("a message nobody sends")

    LocalCommunicator.run(2, work, timeout=0.2)


@pytest.mark.parametrize(
    ("speculation", "expected"), [({"draft_rank": 2}, [(0, 1), (2, 3), (4, 5)]), ({}, [(0, 1, 2), (3, 4, 5)])]
)
def test_rank_that_drafts_has_cores_beside_those_of_the_stages(speculation, expected, monkeypatch):
    options = EngineOptions.from_flat({"ranks": [0, 1], "speculative_config": {"model": "small", **speculation}})
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(rank_group, "bind", bound.append)
    monkeypatch.setattr(rank_group.torch, "set_num_threads", lambda count: None)
    cores = [[cpu] for cpu in range(6)]

    def take(rank: int, comm: LocalCommunicator) -> None:
        group = group_of(comm)
        everyone = [msgspec.structs.replace(group.everyone[0], rank=r, cores=cores, cpu_limit=6.0) for r in range(4)]
        replace(group, ranks=(rank,), everyone=everyone).take_cores(options.working_ranks, 0)

    for rank in range(len(expected)):
        LocalCommunicator.run(1, lambda comm, rank=rank: take(rank, comm))
    assert bound == expected


def test_rank_0_that_cannot_listen_is_named_on_all(monkeypatch):
    def refuse(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(rank_group, "HealthServer", refuse)

    def work(comm):
        everyone = [describe_rank(rank, rank, f"node-{rank}") for rank in range(comm.size)]
        with pytest.raises(UserError) as caught:
            rank_group._open_health_channel(comm, everyone, comm.progress, FaultOptions(), RuntimeOptions())
        return str(caught.value)

    text = "rank 0 on node-0 cannot listen for the other ranks: Too many open files"
    assert LocalCommunicator.run(3, work) == [text] * 3
