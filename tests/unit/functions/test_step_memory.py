"""StepMemory: a tensor's memory is another one's as soon as nothing refers to it."""

from __future__ import annotations

import pytest
import torch

from labinfer.functions.cpu.step_memory import StepMemory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8], ids=str)
def test_tensor_is_like_the_other(dtype):
    memory, other = StepMemory(), torch.empty(3, 5, dtype=dtype)
    tensor = memory.like(other)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (other.shape, dtype, True)
    tensor.fill_(7)
    assert (tensor == 7).all()


def test_memory_is_given_again_when_the_last_view_of_it_is_gone():
    memory, other = StepMemory(), torch.empty(64, 100)
    first = memory.like(other)
    place, view = first.data_ptr(), first[1:].view(-1)
    del first
    assert memory.like(other).data_ptr() != place  # and is gone at once
    view.fill_(1)
    del view
    both = [memory.like(other) for _ in range(2)]
    assert place in {tensor.data_ptr() for tensor in both}
    assert 2 * other.nbytes <= memory.num_bytes < 3 * other.nbytes


def test_like_sizes_share_memory():
    for sizes, most in ((range(1, 129), 4), (range(128, 0, -1), 1.5)):
        memory = StepMemory()
        for rows in sizes:
            memory.like(torch.empty(rows, 1000))
        assert memory.num_bytes < most * 128 * 4000


def test_tensor_outlives_its_memory():
    tensor = StepMemory().like(torch.empty(4000))
    tensor.fill_(3)
    scratch = [torch.full((4000,), float("nan")) for _ in range(20)]
    assert (tensor == 3).all()
    del scratch
