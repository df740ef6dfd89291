"""``AttentionBatch``: where the tokens of a batch stand in their sequences, and where the cache holds what they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """A flat batch of new tokens of several sequences.

    Most sequences of most steps have one new token; those stand together as tensors, too.
    """

    row_ptr: list[int]
    """The tokens of sequence b are rows ``row_ptr[b]:row_ptr[b + 1]``, the last of its context."""
    context_lens: list[int]
    """Tokens of each sequence once this step is done, S."""
    block_tables: list[torch.Tensor]
    """The KV blocks of each sequence in order, int64."""
    single_rows_B: torch.Tensor
    """The rows of sequences with one new token, int64."""
    single_lens_B: torch.Tensor
    """Their context lengths, int64."""
    single_tables_BN: torch.Tensor
    """Their block tables, int64, filled up with zeros."""
    chunks: list[int]
    """The sequences with more than one new token."""

    @classmethod
    def of(
        cls, row_ptr: list[int], context_lens: list[int], tables: list[list[int]], device: torch.device
    ) -> AttentionBatch:
        """From plain lists; ``tables`` are as long as the contexts need."""
        singles = [b for b in range(len(tables)) if row_ptr[b + 1] - row_ptr[b] == 1]
        width = max((len(tables[b]) for b in singles), default=0)
        padded = [tables[b] + [0] * (width - len(tables[b])) for b in singles]
        return cls(
            row_ptr=row_ptr,
            context_lens=context_lens,
            block_tables=[torch.tensor(table, device=device) for table in tables],
            single_rows_B=torch.tensor([row_ptr[b] for b in singles], dtype=torch.int64, device=device),
            single_lens_B=torch.tensor([context_lens[b] for b in singles], dtype=torch.int64, device=device),
            single_tables_BN=torch.tensor(padded, dtype=torch.int64, device=device).view(len(singles), width),
            chunks=[b for b in range(len(tables)) if row_ptr[b + 1] - row_ptr[b] > 1],
        )
