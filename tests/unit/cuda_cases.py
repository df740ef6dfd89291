"""Batches over caches on a card of NVIDIA's kind, where torch has one; else on the CPU, for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference import attention

HAS_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
needs_card = pytest.mark.skipif(not HAS_CARD, reason="torch has no card of this kind here")
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest error, of the largest number: some roundings of the dtype."""
DECODES = [(7, 1), (1, 1), (130, 1)]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == expected.dtype and result.shape == expected.shape
    error = (result.float() - expected.float()).abs().max()
    assert error <= BOUNDS[dtype] * expected.float().abs().max().clamp(min=1e-6), error


def make_places(contexts: Sequence[int], new: Sequence[int], block: int) -> tuple[AttentionBatch, list[torch.Tensor]]:
    """A batch, and the slots of all tokens of each sequence; the last of all blocks is nobody's."""
    counts = [-(-context // block) for context in contexts]
    tables = [table.tolist() for table in torch.randperm(sum(counts)).split(counts)]
    batch = AttentionBatch.build(list(accumulate(new, initial=0)), list(contexts), tables, DEVICE)
    places = zip(tables, contexts, strict=True)
    slots = [[table[p // block] * block + p % block for p in range(context)] for table, context in places]
    return batch, [torch.tensor(each, device=DEVICE) for each in slots]


class Case:
    """Sequences in a cache whose other slots hold what is no number.

    Args:
        lengths: of each sequence, all its tokens and the new ones among them.
    """

    def __init__(self, lengths: list[tuple[int, int]], heads: tuple[int, int], block: int, kv_dtype: torch.dtype):
        self.batch, places = make_places(*zip(*lengths, strict=True), block)
        self.cache = LayerCache.zeros(len(self.batch.tables_N) + 1, block, heads, kv_dtype, device=DEVICE)
        for tensor in self.cache.tensors():
            tensor.fill_(127 if tensor.dtype == torch.int8 else float("nan"))
        for slots in places:
            k, v = (torch.randn(len(slots), *heads, device=DEVICE) for _ in range(2))
            attention.write_kv(k, v, self.cache, slots)
        self.rows = self.batch.row_ptr[-1]
