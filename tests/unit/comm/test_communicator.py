"""Moving bytes: the thread communicator, the wire format, and the three channels built on it."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch

from labinfer.base.errors import WaitTimeout
from labinfer.comm.communicator import name_ranks
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.progress import Progress
from labinfer.comm.torch_dist import TorchCommunicator


def test_all_reduce_sums_in_place_with_the_same_bits_everywhere():
    def work(comm):
        tensor = torch.tensor([1.0, 10.0]) * (comm.rank + 0.1)
        result = comm.all_reduce(tensor)
        assert result is tensor
        return tensor

    results = LocalCommunicator.run(3, work)
    assert torch.allclose(results[0], torch.tensor([3.3, 33.0]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_all_reduce_sums_half_types_in_float32():
    """256 + 1 is 256 in bfloat16: added up there, the ones would be lost."""

    def work(comm):
        return comm.all_reduce(torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16))

    results = LocalCommunicator.run(5, work)
    assert results[0].dtype == torch.bfloat16
    assert [result.item() for result in results] == [260.0] * 5


def test_all_gather_is_in_rank_order():
    results = LocalCommunicator.run(3, lambda comm: comm.all_gather(torch.full((2, 2), comm.rank)))
    for parts in results:
        assert [part.tolist() for part in parts] == [[[r, r], [r, r]] for r in range(3)]


def test_all_gather_bytes_takes_any_lengths():
    results = LocalCommunicator.run(4, lambda comm: comm.all_gather_bytes(b"\x00\xff" * comm.rank))
    assert results == [[b"", b"\x00\xff", b"\x00\xff" * 2, b"\x00\xff" * 3]] * 4
    assert LocalCommunicator.run(2, lambda comm: comm.all_gather_bytes(b"")) == [[b"", b""]] * 2


@pytest.mark.parametrize("root", [0, 2])
def test_gather_lands_on_its_root_only(root):
    sizes = [1, 3, 2]

    def work(comm):
        return comm.gather(torch.arange(sizes[comm.rank]) + 10 * comm.rank, sizes, root)

    results = LocalCommunicator.run(3, work)
    assert [part.tolist() for part in results[root]] == [[0], [10, 11, 12], [20, 21]]
    assert [result for rank, result in enumerate(results) if rank != root] == [None, None]


def test_messages_of_a_pair_arrive_in_the_order_they_were_sent():
    def work(comm):
        if comm.rank == 0:
            for value in range(5):
                comm.isend(torch.tensor([value]), 1)
            return None
        handles = [(buffer, comm.irecv(buffer, 0)) for buffer in torch.empty(5, 1, dtype=torch.int64)]
        for _, handle in handles:
            handle.wait("a number")
        return [int(buffer) for buffer, _ in handles]

    assert LocalCommunicator.run(2, work)[1] == [0, 1, 2, 3, 4]


def test_sender_may_reuse_its_tensor_once_the_handle_is_done():
    def work(comm):
        tensor = torch.zeros(3)
        if comm.rank == 0:
            handle = comm.isend(tensor, 1)
            handle.wait("room")
            tensor.fill_(7)
            return None
        time.sleep(0.05)
        comm.irecv(tensor, 0).wait("zeros")
        return tensor.tolist()

    assert LocalCommunicator.run(2, work)[1] == [0, 0, 0]


def test_done_never_blocks_and_turns_true_when_the_data_is_here():
    def work(comm):
        tensor = torch.zeros(1)
        if comm.rank == 1:
            handle = comm.irecv(tensor, 0)
            before = handle.done()
            comm.isend(torch.ones(1), 0)
            while not handle.done():
                time.sleep(0.001)
            return before, tensor.item()
        comm.irecv(tensor, 1).wait("rank 1's go-ahead")
        comm.isend(torch.full((1,), 5.0), 1)
        return None

    assert LocalCommunicator.run(2, work)[1] == (False, 5.0)


def test_split_makes_groups_with_their_own_ranks_and_messages():
    def work(comm):
        mine = comm.split([[0, 2], [1, 3, 4]])
        twin = comm.split([range(comm.size)])
        comm.isend(torch.tensor([100]), (comm.rank + 1) % comm.size)  # must not be taken for the subgroups' messages
        gathered = [int(part) for part in mine.all_gather(torch.tensor([comm.rank]))]
        total = int(twin.all_reduce(torch.tensor([comm.rank])))
        buffer = torch.zeros(1, dtype=torch.int64)
        comm.irecv(buffer, (comm.rank - 1) % comm.size).wait("the ring")
        return mine.rank, mine.size, gathered, total, int(buffer)

    assert LocalCommunicator.run(5, work) == [
        (0, 2, [0, 2], 10, 100),
        (0, 3, [1, 3, 4], 10, 100),
        (1, 2, [0, 2], 10, 100),
        (1, 3, [1, 3, 4], 10, 100),
        (2, 3, [1, 3, 4], 10, 100),
    ]


def test_wait_without_answer_names_rank_step_and_peer():
    def work(comm):
        if comm.rank == 1:
            comm.progress.label, comm.progress.step_id = "rank 1 (stage 1, tp 0)", 17
            comm.irecv(torch.zeros(1), 0).wait("activations from rank 0", timeout=0.05)

    with pytest.raises(WaitTimeout) as caught:
        LocalCommunicator.run(2, work)
    text = str(caught.value)
    assert text.startswith("rank 1 (stage 1, tp 0) waited 0.05 s")
    assert "step 17" in text and "for activations from rank 0" in text
    assert "--timeout" in text


def test_groups_own_limit_applies_where_a_wait_names_none():
    with pytest.raises(WaitTimeout, match=r"rank 0 waited 0.05 s .*before the first step.* for data from rank 1"):
        LocalCommunicator.run(2, lambda comm: comm.rank or comm.barrier(), timeout=0.05)


def test_progress_says_what_it_waits_for_and_since_when():
    progress = Progress(label="rank 3 (stage 1, tp 0)")
    assert "before the first step" in progress.describe() and "waiting for no other rank" in progress.describe()
    progress.step_id = 12
    with progress.waiting("the sum over ranks 2-3"):
        time.sleep(0.11)
        assert re.search(
            r"rank 3 \(stage 1, tp 0\): step 12, waiting 0\.[1-9] s for the sum over ranks 2-3", progress.describe()
        )
    assert "waiting for no other rank" in progress.describe()


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([0, 1, 2, 3], "ranks 0-3"), ([0, 3], "ranks 0, 3"), ([5], "rank 5"), (range(2, 4), "ranks 2-3")],
)
def test_members_of_a_group_are_named_shortly(ranks, name):
    assert name_ranks(ranks) == name


def test_run_hands_on_what_a_thread_raised():
    def work(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        comm.barrier()

    with pytest.raises(KeyError, match="lost"):
        LocalCommunicator.run(2, work)


def test_unlimited_wait_is_spelled_inf():
    def work(comm):
        if comm.rank == 0:
            time.sleep(0.2)
            comm.isend(torch.ones(1), 1)
            return None
        tensor = torch.zeros(1)
        comm.irecv(tensor, 0).wait("one", math.inf)
        return tensor.item()

    assert LocalCommunicator.run(2, work, timeout=0.05)[1] == 1.0


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (5, torch.float32)])
def test_vendor_library_sums_half_types_of_many_ranks_in_float32(size, dtype, monkeypatch):
    """Such a library rounds each partial sum to the dtype of the tensor; two tensors have no partial sum."""
    comm, given = TorchCommunicator.__new__(TorchCommunicator), []
    comm.name, comm.size, comm.rank, comm.members, comm._group = "hccl", size, 0, name_ranks(range(size)), None
    monkeypatch.setattr(comm, "_run", lambda begin, buffer, what: given.append(buffer.mul_(size)), raising=False)
    tensor = torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)
    assert comm.all_reduce(tensor) is tensor and [buffer.dtype for buffer in given] == [dtype]
    assert tensor == (size * torch.tensor([1.0 + 2**-7])).bfloat16()
