"""Ranks that meet in a store that others have used before."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from labinfer.base.errors import UserError
from labinfer.comm.progress import Progress
from labinfer.comm.rendezvous import fresh_namespace
from labinfer.comm.torch_dist import TorchCommunicator


def test_each_attempt_has_a_part_of_its_own_whoever_died_before():
    store = dist.HashStore()
    seen = []
    with ThreadPoolExecutor(3) as threads:
        for attempt in range(3):
            store.set("come/2", "of one that died before all were here")
            parts = list(threads.map(lambda rank: fresh_namespace(store, rank, 3, 10.0), range(3)))
            assert not parts[1].check(["address/0"])
            parts[0].set("address/0", str(attempt))
            seen.append([part.get("address/0") for part in parts])
    assert seen == [[b"0"] * 3, [b"1"] * 3, [b"2"] * 3]


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(RuntimeError, match="no message from rank 1, rank 2 within 0.05 s"):
        fresh_namespace(dist.HashStore(), 0, 3, 0.05)


def test_a_port_of_another_program_is_told_with_the_variable_that_sets_it():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"at node-a:{port}: .*another program uses that port: set MASTER_PORT"):
            TorchCommunicator.join(
                Progress(timeout=5),
                f"tcp://127.0.0.1:{port}",
                rank=0,
                world_size=2,
                place=f"node-a:{port}",
                own_addresses=["192.0.2.1"],
            )
