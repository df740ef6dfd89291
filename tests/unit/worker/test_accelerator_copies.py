"""Copies of an accelerator: pinned buffers, several tensors at a time, blocks of all layers together; on the CPU with a late stand-in."""

from __future__ import annotations

import pytest
import torch

from labinfer.worker import accelerator_copies
from labinfer.worker.accelerator_copies import PinnedUploads, make_host_copies, move_staged
from labinfer.worker.host_copies import HostCopies


class Event:
    """An event of an accelerator that is late: what was recorded is complete only once something waits for it."""

    late: list = []

    def __init__(self, device):
        self._copies = []

    def record(self):
        self._copies, Event.late = Event.late, []

    def query(self):
        return not self._copies

    def synchronize(self):
        for numbers, dest in self._copies:
            dest.copy_(numbers)
        self._copies = []


class Late(torch.Tensor):
    """Memory of such an accelerator."""

    def copy_(self, source, non_blocking=False):
        if non_blocking:
            Event.late.append((source, self))
            return self
        return super().copy_(source)


def test_pinned_buffer_is_filled_again_only_after_its_copy(monkeypatch):
    monkeypatch.setattr(accelerator_copies, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch, "Event", Event)
    uploads, count = PinnedUploads(torch.device("cpu")), accelerator_copies.NUM_BUFFERS
    places = [torch.full((3,), -1).as_subclass(Late) for _ in range(count + 2)]
    for step, place in enumerate(places):
        uploads.copy(torch.full((3,), step), place)
        assert (place == -1).all()  # nothing was waited for
    assert [place[0].item() for place in places] == [0, 1, *[-1] * count]
    for _, event in uploads._turns:
        event.synchronize()
    assert [place[0].item() for place in places] == [*range(count + 2)]


def test_pinned_buffer_grows(monkeypatch):
    monkeypatch.setattr(accelerator_copies, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch, "Event", Event)
    uploads, count = PinnedUploads(torch.device("cpu")), accelerator_copies.BUFFER_BYTES // 8 + 5
    place = torch.zeros(count, dtype=torch.int64)
    uploads.copy(torch.arange(count), place)
    assert torch.equal(place, torch.arange(count))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a torch without an accelerator")
def test_memory_that_cannot_be_pinned_is_copied_as_it_is():
    place = torch.zeros(3, dtype=torch.int64)
    make_host_copies(torch.device("cuda")).upload(torch.arange(3), place)
    assert place.tolist() == [0, 1, 2]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a torch without an accelerator")
def test_tensors_come_to_the_host_together():
    copies = make_host_copies(torch.device("cuda"))
    parts = [torch.randn(3, 1), torch.randn(3, 2), torch.tensor([[2**31 - 1], [0], [-5]])]
    parts[0][1], parts[1][2, 0] = float("-inf"), float("nan")
    for got, part in zip(copies.download(parts), parts, strict=True):
        assert str(got.tolist()) == str(part.tolist())  # NaN included


def test_cpu_has_plain_copies():
    copies, part = make_host_copies(torch.device("cpu")), torch.ones(2, 1)
    assert type(copies) is HostCopies and copies.download([part])[0] is part


@pytest.mark.parametrize(("most_bytes", "num_transfers"), [(1, 4), (1000, 2), (1 << 20, 1)])
@pytest.mark.parametrize("blocks", [[1], [1, 3]])
def test_pools_share_transfers(most_bytes, num_transfers, blocks, monkeypatch):
    """Of four pools of 400 to 480 bytes for each transfer, padding included."""
    monkeypatch.setattr(accelerator_copies, "STAGED_BYTES", most_bytes)
    sizes, empty = [], torch.empty
    count, source = len(blocks), torch.tensor(blocks)
    shapes = [((25, 4), torch.float32), ((7, 57), torch.int8), ((240,), torch.bfloat16), ((10, 10), torch.float32)]
    pools = [torch.arange(6 * torch.Size(shape).numel()).view(6, *shape).to(dtype) for shape, dtype in shapes]
    others = [torch.zeros_like(pool) for pool in pools]
    monkeypatch.setattr(torch, "empty", lambda *size, **named: sizes.append(size) or empty(*size, **named))
    move_staged(list(zip(pools, others, strict=True)), source, torch.arange(count))
    for pool, other in zip(pools, others, strict=True):
        assert torch.equal(other[:count], pool[source]) and not other[count:].any()
    assert len(sizes) == num_transfers if count == 1 else len(sizes) >= num_transfers
