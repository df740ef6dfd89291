"""The vocabulary at both ends of the model, cut over the ranks of a stage by token id."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.layers.context import StageContext
from labinfer.spmd.topology import deal
from labinfer.weights.source import TensorSource, WeightedModule, empty_parameter


class VocabParallelEmbedding(WeightedModule):
    """Token ids → hidden states. Each rank looks up the ids it holds; the sum over the ranks is exact, as all others give 0."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: StageContext):
        super().__init__()
        self._vocab_size = vocab_size
        self._begin, self._end = deal(vocab_size, ctx.tp.size)[ctx.tp.rank]
        self._embedding, self._pack_weight, self._tp = ctx.functions.embedding, ctx.functions.pack_weight, ctx.tp
        self.weight = empty_parameter(self._end - self._begin, hidden_size, dtype=ctx.dtype)

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._embedding(token_ids_T, self.weight, self._begin))

    def pack(self) -> None:
        self._pack_weight(self.weight)

    def sources(self, prefix: str) -> Iterator[TensorSource]:
        yield TensorSource(
            f"{prefix}.weight",
            (self._vocab_size, self.weight.shape[1]),
            0,
            self._begin,
            self._end,
            self.weight.detach(),
        )


class ParallelLMHead(WeightedModule):
    """Hidden states → logits on tp rank 0 of the last stage.

    Args:
        tied: the embedding's name in the checkpoint when the head has no weights of its own.
        shared: the embedding layer itself when this rank holds it too, so that the matrix is held once.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ctx: StageContext,
        tied: str | None = None,
        shared: VocabParallelEmbedding | None = None,
    ):
        super().__init__()
        self._vocab_size, self._tied, self._is_shared = vocab_size, tied, shared is not None
        self._ranges = deal(vocab_size, ctx.tp.size)
        self._begin, self._end = self._ranges[ctx.tp.rank]
        self._linear, self._pack_weight, self._tp = ctx.functions.linear, ctx.functions.pack_weight, ctx.tp
        self.weight = (
            shared.weight
            if shared is not None
            else empty_parameter(self._end - self._begin, hidden_size, dtype=ctx.dtype)
        )

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor | None:
        """(B, D) → (B, V) on tp rank 0, None on the others."""
        slice_BV = self._linear(hidden_BD, self.weight)
        return self._tp.gather_columns(slice_BV, [end - begin for begin, end in self._ranges])

    def pack(self) -> None:
        if not self._is_shared:
            self._pack_weight(self.weight)

    def sources(self, prefix: str) -> Iterator[TensorSource]:
        if not self._is_shared:
            yield TensorSource(
                self._tied or f"{prefix}.weight",
                (self._vocab_size, self.weight.shape[1]),
                0,
                self._begin,
                self._end,
                self.weight.detach(),
            )
