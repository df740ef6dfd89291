"""``sigmoid`` and ``tanh`` of a number have the same bits wherever the number stands in a tensor."""

from __future__ import annotations

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.reference import elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sigmoid_has_the_same_bits_anywhere_in_a_tensor(dtype):
    """``torch.sigmoid`` has others at the end of a tensor, and of a thread's part of it."""
    x = 4 * torch.randn(100_003).to(dtype)
    with threads_of_torch(3):
        whole = elementwise.sigmoid(x)
    torch.testing.assert_close(whole, x.sigmoid(), rtol={torch.float32: 1e-6}.get(dtype, 2**-7), atol=1e-7)
    with threads_of_torch(1):
        for begin in range(0, len(x), 997):
            assert torch.equal(
                elementwise.sigmoid(x[begin : begin + begin % 40 + 1].clone()), whole[begin : begin + begin % 40 + 1]
            )
    if dtype == torch.float32:
        assert any(
            not torch.equal(x[i : i + 7].clone().sigmoid(), x.sigmoid()[i : i + 7]) for i in range(0, 99_000, 997)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tanh_of_torch_has_the_same_bits_anywhere_in_a_tensor(dtype):
    """It caps logits, of which each request has a row."""
    x = 4 * torch.randn(100_003).to(dtype)
    with threads_of_torch(3):
        whole = x.tanh()
    with threads_of_torch(1):
        for begin in range(0, len(x), 97):
            end = begin + begin % 40 + 1
            assert torch.equal(x[begin:end].tanh(), whole[begin:end])
            assert torch.equal(x[begin:end].clone().tanh(), whole[begin:end])
