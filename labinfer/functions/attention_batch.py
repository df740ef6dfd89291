"""``AttentionBatch``: token rows, context lengths and block tables of a batch's sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import torch

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's rotary angles, (T, R) each, in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """A flat (ragged) batch of new tokens of several sequences, as lists and as int64 tensors."""

    row_ptr: list[int]
    """Sequence b has rows ``row_ptr[b]:row_ptr[b + 1]``, the last tokens of its context."""
    context_lens: list[int]
    """Context length of each sequence after this step, S."""
    table_ptr: list[int]
    """KV blocks of sequence b in order: ``tables_N[table_ptr[b]:table_ptr[b + 1]]``."""
    tables_N: torch.Tensor
    row_ptr_B: torch.Tensor
    context_lens_B: torch.Tensor
    table_ptr_B: torch.Tensor
    state_slots_B: torch.Tensor | None = None
    """State slot of each sequence in layers with a state; None if no layer has one. A sequence without earlier tokens starts from a
    zero state, whatever its slot holds."""
    _parts: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cache of ``part`` and ``derived``: all layers of a step ask for equal values."""

    @classmethod
    def build(
        cls, row_ptr: list[int], context_lens: list[int], tables: Sequence[Sequence[int]], device: torch.device
    ) -> AttentionBatch:
        """Create the tensors from the lists.

        Args:
            tables: block table of each sequence, exactly as long as its context needs.
        """
        table_ptr = list(accumulate(map(len, tables), initial=0))
        parts = list(chain.from_iterable(tables)), row_ptr, context_lens, table_ptr
        # One tensor for all parts is one copy to an accelerator.
        tensors = int64_tensor(chain.from_iterable(parts), device).split([*map(len, parts)])
        names = "tables_N", "row_ptr_B", "context_lens_B", "table_ptr_B"
        return cls(
            row_ptr=row_ptr, context_lens=context_lens, table_ptr=table_ptr, **dict(zip(names, tensors, strict=True))
        )

    def has_single_rows(self, rows_T: torch.Tensor) -> bool:
        """Whether every sequence has exactly one of the rows ``rows_T``; compares counts only, as no sequence has zero rows."""
        return rows_T.shape[0] == self.context_lens_B.shape[0]

    def with_tables(self, tables_N: torch.Tensor) -> AttentionBatch:
        """Copy of this batch with other block tables of equal lengths, such as those of sliding-window layers."""
        return replace(self, tables_N=tables_N, _parts={})

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, cached in this batch under ``key``, a tuple that begins with the caller's name: for tensors that all layers share."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def part(self, indices: Sequence[int]) -> tuple[torch.Tensor, AttentionBatch]:
        """Row indices of the sequences ``indices``, (R,), and the batch of these sequences alone, in this order."""
        key = tuple(indices)
        if key not in self._parts:
            rows, blocks = ([range(ptr[b], ptr[b + 1]) for b in key] for ptr in (self.row_ptr, self.table_ptr))
            row_ptr, device = list(accumulate(map(len, rows), initial=0)), self.tables_N.device
            # Indices into ``tables_N`` stand in for blocks, so that no block table is read back from an accelerator.
            batch = AttentionBatch.build(row_ptr, [self.context_lens[b] for b in key], blocks, device)
            batch = replace(batch, tables_N=self.tables_N[batch.tables_N])
            if self.state_slots_B is not None:
                batch = replace(batch, state_slots_B=self.state_slots_B[list(key)])
            self._parts[key] = int64_tensor(chain.from_iterable(rows), device), batch
        return self._parts[key]


def int64_tensor(numbers: Iterable[int], device: torch.device) -> torch.Tensor:
    """Int64 tensor of a long list; much faster than ``torch.tensor``."""
    buffer = array("q", numbers)
    return (torch.frombuffer(buffer, dtype=torch.int64) if buffer else torch.empty(0, dtype=torch.int64)).to(device)
