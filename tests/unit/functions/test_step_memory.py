"""StepMemory: a tensor's memory is another one's as soon as nothing refers to it."""

from __future__ import annotations

import pytest
import torch

from labinfer.functions.cpu import step_memory
from labinfer.functions.cpu.step_memory import StepMemory
from labinfer.functions.graph import SHARED_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8], ids=str)
def test_tensor_is_like_the_other(dtype):
    memory, other = StepMemory(), torch.empty(3, 5, dtype=dtype)
    tensor = memory.empty_like(other)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (other.shape, dtype, True)
    tensor.fill_(7)
    assert (tensor == 7).all()


def test_memory_is_given_again_when_the_last_view_of_it_is_gone():
    memory, other = StepMemory(), torch.empty(64, 100)
    first = memory.empty_like(other)
    place, view = first.data_ptr(), first[1:].view(-1)
    del first
    assert memory.empty_like(other).data_ptr() != place  # and is gone at once
    view.fill_(1)
    del view
    both = [memory.empty_like(other) for _ in range(2)]
    assert place in {tensor.data_ptr() for tensor in both}
    assert 2 * other.nbytes <= memory.num_bytes < 3 * other.nbytes


def test_like_sizes_share_memory():
    for width in (1000, 1025):
        for sizes, most in ((range(1, 129), 5), (range(128, 0, -1), 1.5)):
            memory = StepMemory()
            for rows in sizes:
                memory.empty_like(torch.empty(rows, width))
            assert memory.num_bytes < most * 128 * 4 * width


def test_tensor_outlives_its_memory():
    tensor = StepMemory().empty_like(torch.empty(4000))
    tensor.fill_(3)
    scratch = [torch.full((4000,), float("nan")) for _ in range(20)]
    assert (tensor == 3).all()
    del scratch


def test_memory_is_bounded():
    memory, other = StepMemory(), torch.empty(SHARED_BYTES // 4, dtype=torch.uint8)
    held = [memory.empty_like(other) for _ in range(4)]
    assert memory.empty_like(other) is None
    del held[0]
    assert memory.empty_like(other) is not None


def test_alias_is_the_same_view_but_holds_nothing():
    memory, other = StepMemory(), torch.empty(8, 100)
    tensor = memory.empty_like(other).normal_()
    for view in (tensor, tensor[2:5, ::3], tensor.t()[7:]):
        assert torch.equal(memory.alias(view), view) and memory.alias(view).data_ptr() == view.data_ptr()
    place, alias = tensor.data_ptr(), memory.alias(tensor[3])
    del tensor, view
    assert memory.empty_like(other).data_ptr() == place
    assert memory.alias(other) is other and alias.shape == (100,)


def test_memory_that_another_step_had_cannot_be_taken():
    memory, other = StepMemory(), torch.empty(64, 100)
    memory.begin_step()
    memory.empty_like(other)
    memory.begin_step()
    shared, fresh = memory.empty_like(other), memory.empty_like(other)
    assert memory.held_bytes() == memory.num_bytes
    assert memory.take(shared) is None
    own = memory.take(fresh)
    assert own.data_ptr() == fresh.data_ptr() and memory.take(other) is other
    del fresh
    assert memory.empty_like(other).data_ptr() != own.data_ptr()


def test_blocks_that_come_back_in_the_midst_of_a_search_are_not_mistaken(monkeypatch):
    """A finalizer may run whenever Python allocates."""
    memory = StepMemory()
    small, large = (memory.empty_like(torch.empty(size, dtype=torch.uint8)) for size in (100, 1 << 20))
    place, search = large.data_ptr(), step_memory.bisect.bisect_left
    del large

    def search_and_lose(*arguments, **named):
        nonlocal small
        index, small = search(*arguments, **named), None
        return index

    monkeypatch.setattr(step_memory.bisect, "bisect_left", search_and_lose)
    assert memory.empty_like(torch.empty(1 << 20, dtype=torch.uint8)).data_ptr() == place
