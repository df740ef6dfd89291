"""Per-layer embeddings: an extra input of each layer for every token (model card of google/gemma-4-E2B-it)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from labinfer.models.layers.context import StageContext
from labinfer.models.layers.embedding import VocabParallelEmbedding
from labinfer.models.layers.linear import ReplicatedLinear
from labinfer.models.layers.norm import RMSNorm
from labinfer.models.layers.segments import without_segment
from labinfer.weights.slices import TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbeddingConfig:
    """Unsharded sizes of per-layer embeddings."""

    size: int
    """Embedding size per layer, P."""
    vocab_size: int
    num_layers: int


class PerLayerEmbedding(nn.Module):
    """Per-layer embeddings of a stage's layers; a stage holds the columns of table and projection for its own layers."""

    def __init__(self, config: PerLayerEmbeddingConfig, hidden_size: int, norm_eps: float, ctx: StageContext):
        super().__init__()
        self._size, width = config.size, config.num_layers * config.size
        columns = (ctx.first_layer * config.size, ctx.last_layer * config.size)
        if ctx.row_parallel is None:
            self.table = VocabParallelEmbedding(config.vocab_size, width, ctx, columns=columns)
        else:
            self.table = SegmentedTable(config, ctx)
        self.projection = ReplicatedLinear(hidden_size, width, ctx, "layer", columns)
        # The reference divides the projection by sqrt(hidden_size) before this norm: equal to a larger epsilon.
        self.norm = RMSNorm(config.size, norm_eps * hidden_size, ctx)
        self._table_scale = torch.tensor(config.size**0.5, dtype=ctx.dtype, device="cpu")
        self._mean_scale = torch.tensor(0.5**0.5, dtype=torch.float32, device="cpu")
        """``_mean_scale`` and ``_table_scale`` are tensors, so that captured steps can replay the products."""

    def forward(self, token_ids_T: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """Per-layer embeddings, (T, layers of the stage, P).

        Args:
            embedded_TD: token embeddings, the input of the model's first layer.
        """
        _, projected_NP = self.norm(self.projection(embedded_TD).view(-1, self._size))
        known_NP = self.table(token_ids_T).view(-1, self._size) * self._table_scale
        return ((projected_NP + known_NP) * self._mean_scale).view(len(token_ids_T), -1, self._size)


class SegmentedTable(nn.Module):
    """Table of a reproducible run: the columns of each layer are quantized by themselves, so that scales do not depend on the stages."""

    def __init__(self, config: PerLayerEmbeddingConfig, ctx: StageContext):
        super().__init__()
        self._tp = ctx.tp
        self.segments = nn.ModuleList(
            TableSegment(config, layer, ctx) for layer in range(ctx.first_layer, ctx.last_layer)
        )

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings of the stage's layers side by side, (T,) → (T, layers of the stage * P)."""
        return self._tp.all_reduce(torch.cat([segment.partial(token_ids_T) for segment in self.segments], dim=1))


class TableSegment(VocabParallelEmbedding):
    """Columns of one layer in the table of per-layer embeddings."""

    def __init__(self, config: PerLayerEmbeddingConfig, layer: int, ctx: StageContext):
        columns = (layer * config.size, (layer + 1) * config.size)
        super().__init__(config.vocab_size, config.num_layers * config.size, ctx, columns=columns)

    def partial(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings of the ids that this rank holds, zeros for the others: (T,) → (T, P)."""
        return self._functions.embedding(token_ids_T, self.packed, self._begin)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return super().slices(without_segment(prefix))


class PerLayerGate(nn.Module):
    """A layer's gate on its per-layer embedding: ``norm(project(gelu(gate(hidden)) * input))``, with the tanh approximation of GELU."""

    def __init__(self, config: PerLayerEmbeddingConfig, hidden_size: int, norm_eps: float, ctx: StageContext):
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, config.size, ctx, "layer")
        self.projection = ReplicatedLinear(config.size, hidden_size, ctx, "layer")
        self.norm = RMSNorm(hidden_size, norm_eps, ctx)
        self._gelu_and_mul = ctx.functions.gelu_and_mul

    def forward(self, hidden_TD: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        """(T, D), (T, P) → (T, D), a delta of the hidden states."""
        gated_TP = self._gelu_and_mul(torch.cat((self.gate(hidden_TD), input_TP), dim=1))
        return self.norm(self.projection(gated_TP))[1]


class LayerScalar(WeightedModule):
    """A learned factor on a layer's output."""

    def __init__(self, ctx: StageContext):
        super().__init__()
        self.value_1 = empty_parameter(1, dtype=ctx.dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD * self.value_1

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield TensorSlice(name=prefix, shape=(1,), destination=self.value_1)
