"""Batches over caches on the CPU, for functions that call the stand-in for torch_npu."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference import attention

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest error, of the largest number: some roundings of the dtype."""


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == expected.dtype and result.shape == expected.shape
    if result.numel():
        error = (result.float() - expected.float()).abs().max()
        assert error <= BOUNDS[dtype] * expected.float().abs().max().clamp(min=1e-6), error


class NpuCase:
    """Sequences over a pool of which every other slot holds NaN; blocks before a window are nobody's.

    Args:
        lengths: of each sequence, all its tokens and the new ones among them.
        window: size of a sliding window; 0 for none.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        heads: tuple[int, int],
        dtype: torch.dtype,
        *,
        block: int = 128,
        window: int = 0,
        spare: int = 1,
    ):
        counts = [-(-context // block) for context, _ in lengths]
        tables = [table.tolist() for table in torch.randperm(sum(counts)).split(counts)]
        self.cache = LayerCache.zeros(sum(counts) + spare, block, heads, dtype)
        for tensor in (self.cache.k, self.cache.v):
            tensor.fill_(float("nan"))
        for table, (context, new) in zip(tables, lengths, strict=True):
            first = max(0, context - new - window + 1) // block * block if window else 0
            table[: first // block] = [sum(counts)] * (first // block)  # any block
            slots = torch.tensor([table[p // block] * block + p % block for p in range(first, context)])
            attention.write_kv(*(torch.randn(len(slots), *heads) for _ in range(2)), self.cache, slots)
        row_ptr = [0, *accumulate(new for _, new in lengths)]
        self.batch = AttentionBatch.build(row_ptr, [context for context, _ in lengths], tables, torch.device("cpu"))
        self.rows = row_ptr[-1]
