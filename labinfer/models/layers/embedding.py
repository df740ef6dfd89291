"""Vocabulary-parallel embedding and LM head, sharded over the ranks of a stage by token id."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.comm.spmd.topology import shard_range
from labinfer.functions.calls import FunctionCall
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.matrix import Matrix
from labinfer.weights.slices import MatrixSlice, Range, WeightSlice


class VocabParallelEmbedding(Matrix):
    """A matrix with a row for each token id: the embedding table of the first stage, the LM head of the last.

    Args:
        tied: checkpoint name of another layer's matrix that this one shares (weight tying).
        columns: range of the hidden size that is held; None for all.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ctx: StageContext,
        tied: str | None = None,
        *,
        columns: Range | None = None,
    ):
        self._hidden_size, self._columns = hidden_size, columns or (0, hidden_size)
        ranges = shard_range(vocab_size, ctx.tp.size)
        begin, end = ranges[ctx.tp.rank]
        super().__init__(end - begin, self._columns[1] - self._columns[0], "vocabulary", ctx)
        self._vocab_size, self._tied, self._tp = vocab_size, tied, ctx.tp
        self._ranges, self._begin, self._end = ranges, begin, end

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings, (T,) → (T, D). The all-reduce is exact: every rank but the one that holds the id contributes 0."""
        return self._tp.all_reduce(self._functions.embedding(token_ids_T, self.packed, self._begin))

    def calls(self) -> Iterator[FunctionCall]:
        """No calls: embedding is not timed, and the model lists the product of its LM head."""
        return iter(())

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor | None:
        """Logits of normalized hidden states, (B, D) → (B, V) on TP rank 0, None on the other ranks."""
        slice_BV = self.product(hidden_BD)
        return self._tp.gather_columns(slice_BV, [end - begin for begin, end in self._ranges])

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield MatrixSlice(
            name=self._tied or prefix,
            outputs=self._vocab_size,
            inputs=self._hidden_size,
            rows=(self._begin, self._end),
            columns=self._columns,
            destination=self.memory(0, self.num_outputs),
        )
