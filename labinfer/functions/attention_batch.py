"""``AttentionBatch``: where the tokens of a batch stand in their sequences, and where the cache holds what they see."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """A flat batch of new tokens of several sequences, as lists and as tensors of int64."""

    row_ptr: list[int]
    """The tokens of sequence b are rows ``row_ptr[b]:row_ptr[b + 1]``, the last of its context."""
    context_lens: list[int]
    """Tokens of each sequence once this step is done, S."""
    table_ptr: list[int]
    """The KV blocks of sequence b in order are ``tables_N[table_ptr[b]:table_ptr[b + 1]]``."""
    tables_N: torch.Tensor
    row_ptr_B: torch.Tensor
    context_lens_B: torch.Tensor
    table_ptr_B: torch.Tensor

    @classmethod
    def of(
        cls, row_ptr: list[int], context_lens: list[int], tables: Sequence[Sequence[int]], device: torch.device
    ) -> AttentionBatch:
        """``tables`` are as long as the contexts need."""
        table_ptr = list(accumulate(map(len, tables), initial=0))
        return cls(
            row_ptr,
            context_lens,
            table_ptr,
            int64_tensor(chain.from_iterable(tables), device),
            int64_tensor(row_ptr, device),
            int64_tensor(context_lens, device),
            int64_tensor(table_ptr, device),
        )


def int64_tensor(numbers: Iterable[int], device: torch.device) -> torch.Tensor:
    """Much faster than ``torch.tensor`` of a long list."""
    held = array("q", numbers)
    return (torch.frombuffer(held, dtype=torch.int64) if held else torch.empty(0, dtype=torch.int64)).to(device)
