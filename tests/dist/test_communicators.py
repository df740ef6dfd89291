"""Every call of the communicators, at whatever world size and over whatever transport these tests were started."""

from __future__ import annotations

import time

import pytest
import torch

from labinfer.base.errors import WaitTimeout
from labinfer.comm.shared_memory import share_memory
from labinfer.comm.shared_memory_ring import LARGEST_BYTES, RingCommunicator, share_rings

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SIZES = (0, 1, 7, 1000, 100_003)


@pytest.fixture(params=["transport alone", "shared memory", "rings"])
def comm(request, group):
    comm = group.comm.split([range(group.size)])
    match request.param:
        case "transport alone":
            return comm
        case "shared memory":
            return share_memory(comm)
        case _:
            return share_rings(comm, [comm], range(group.size))[0]


@pytest.fixture
def rings(group):
    """The group with rings in shared memory."""
    comm = group.comm.split([range(group.size)])
    (comm,) = share_rings(comm, [comm], range(group.size))
    if not isinstance(comm, RingCommunicator):
        pytest.skip("needs two ranks and a C++ compiler")
    return comm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_and_gives_every_rank_the_same_bits(comm, size, dtype):
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randint(-8, 8, (size,), generator=generator).to(dtype) for _ in range(comm.size)]
    result = comm.all_reduce(parts[comm.rank].clone())
    assert torch.equal(result, torch.stack([part.double() for part in parts]).sum(0).to(dtype))
    noisy = comm.all_reduce(torch.randn(size, generator=generator) * (comm.rank + 1))
    assert all(torch.equal(noisy, other) for other in comm.all_gather(noisy))


def test_all_reduce_of_a_strided_tensor(comm):
    tensor = torch.full((6, 4), float(comm.rank + 1))[:, 1:3]
    assert torch.equal(comm.all_reduce(tensor), torch.full((6, 2), comm.size * (comm.size + 1) / 2))


def test_all_gather_is_in_rank_order(comm):
    gathered = comm.all_gather(torch.tensor([[comm.rank, -comm.rank]]))
    assert [part.tolist() for part in gathered] == [[[rank, -rank]] for rank in range(comm.size)]


def test_all_gather_bytes_of_any_length(comm):
    data = b"x" * (comm.rank * 5000)
    assert comm.all_gather_bytes(data) == [b"x" * (rank * 5000) for rank in range(comm.size)]
    assert comm.all_gather_bytes(b"") == [b""] * comm.size


@pytest.mark.parametrize("root", [0, -1])
def test_gather_of_unequal_parts(comm, root):
    root %= comm.size
    sizes = [3 + 2 * rank for rank in range(comm.size)]
    parts = comm.gather(torch.full((sizes[comm.rank],), float(comm.rank)), sizes, root)
    if comm.rank != root:
        assert parts is None
    else:
        assert [part.tolist() for part in parts] == [[float(rank)] * sizes[rank] for rank in range(comm.size)]


def test_messages_between_a_pair_keep_their_order(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    outgoing = [torch.full((count * 777,), count) for count in range(1, 9)]
    incoming = [torch.empty(count * 777, dtype=torch.int64) for count in range(1, 9)]
    receives = [comm.irecv(tensor, before) for tensor in incoming]
    sends = [comm.isend(tensor, after) for tensor in outgoing]
    for handle in receives + sends:
        handle.wait("a message of this test")
    assert all(bool((tensor == count).all()) for count, tensor in enumerate(incoming, start=1))


def test_split_into_halves(comm):
    middle = (comm.size + 1) // 2
    groups = [range(middle), range(middle, comm.size)] if comm.size > 1 else [range(1)]
    half = comm.split(groups)
    mine = groups[0] if comm.rank < middle else groups[1]
    assert (half.rank, half.size) == (comm.rank - mine.start, len(mine))
    assert [int(part) for part in half.all_gather(torch.tensor([comm.rank]))] == list(mine)


def test_wait_without_an_answer_times_out_by_name(group):
    """On MPI only: a gloo connection does not outlive a wait that timed out."""
    if group.comm.name != "mpi" or group.size == 1:
        pytest.skip("needs MPI and two ranks")
    comm = group.comm.split([range(group.size)])
    if comm.rank == 0:
        handle = comm.irecv(torch.empty(4), 1)
        with pytest.raises(WaitTimeout, match=r"rank 0.* waited 0\.2 s .* for a message nobody sends"):
            handle.wait("a message nobody sends", 0.2)
    comm.barrier()
    if comm.rank == 1:
        comm.isend(torch.zeros(4), 0).wait("the receive that was left over")
    comm.barrier()


def test_what_is_too_large_for_a_ring_moves_on_while_its_sender_waits_for_something_else(rings):
    """Over MPI it moves only while both ends call the library."""
    large = torch.arange(16 * LARGEST_BYTES)
    if rings.rank == 0:
        sent = rings.isend(large, 1)
        answer = torch.empty(1)
        rings.irecv(answer, 1).wait("the answer", 20)
        sent.wait("rank 1 to take it", 20)
        assert answer.item() == 7
    elif rings.rank == 1:
        arrival = torch.empty_like(large)
        rings.irecv(arrival, 0).wait("the large message", 20)
        assert torch.equal(arrival, large)
        rings.isend(torch.tensor([7.0]), 0).wait("room", 20)


@pytest.mark.parametrize("size", [0, 40, LARGEST_BYTES - 16, LARGEST_BYTES])
def test_header_and_tensor_are_one_message(comm, size):
    if comm.rank == 0 and comm.size > 1:
        for send in comm.isend_after(b"0123456789abcdef", torch.arange(size // 8), range(1, comm.size)):
            send.wait("another rank to take it")
    elif comm.rank:
        message = torch.empty(16 + size, dtype=torch.uint8)
        comm.irecv(message, 0).wait("the message")
        assert message[:16].numpy().tobytes() == b"0123456789abcdef"
        assert message[16:].view(torch.int64).tolist() == list(range(size // 8))


def test_who_waits_for_a_ring_sleeps_until_the_event(rings, monkeypatch):
    for name in ("SHORTEST_SLEEP", "LONGEST_SLEEP", "LONGEST_SLEEP_WITH_EVENT"):
        monkeypatch.setattr(f"labinfer.comm.shared_memory_ring.{name}", 20.0)
    if rings.rank == 0:
        time.sleep(1.0)
        rings.isend(torch.tensor([time.monotonic()], dtype=torch.float64), 1).wait("room")
    elif rings.rank == 1:
        sent, begin = torch.empty(1, dtype=torch.float64), time.thread_time()
        rings.irecv(sent, 0).wait("a late message")
        late, busy = time.monotonic() - sent.item(), time.thread_time() - begin
        assert busy < 0.15 and late < 1.0


def test_a_ring_that_stays_empty_is_named(rings):
    if rings.rank == 0:
        with pytest.raises(WaitTimeout, match=r"rank 0.* waited 0\.2 s .* for a message nobody sends"):
            rings.irecv(torch.empty(4), 1).wait("a message nobody sends", 0.2)
