"""Per-layer embeddings: what every layer is told about a token beside the hidden states (model card of google/gemma-4-E2B-it)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from labinfer.models.layers.context import StageContext
from labinfer.models.layers.embedding import VocabParallelEmbedding
from labinfer.models.layers.linear import ReplicatedLinear
from labinfer.models.layers.norm import RMSNorm
from labinfer.weights.slices import TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbeddingConfig:
    """Per-layer embeddings over the whole model."""

    size: int
    """Numbers for each layer, P."""
    vocab_size: int
    num_layers: int


class PerLayerEmbedding(nn.Module):
    """The inputs of a stage's layers: of all columns of table and projection a stage holds those of its layers."""

    def __init__(self, config: PerLayerEmbeddingConfig, hidden_size: int, norm_eps: float, ctx: StageContext):
        super().__init__()
        self._size, width = config.size, config.num_layers * config.size
        columns = (ctx.first_layer * config.size, ctx.last_layer * config.size)
        self.table = VocabParallelEmbedding(config.vocab_size, width, ctx, columns=columns)
        self.projection = ReplicatedLinear(hidden_size, width, ctx, "layer", columns)
        # The projection is divided by the root of the hidden size before this norm, which only its epsilon can tell.
        self.norm = RMSNorm(config.size, norm_eps * hidden_size, ctx)
        self._table_scale = torch.tensor(config.size**0.5, dtype=ctx.dtype, device="cpu")
        self._mean_scale = torch.tensor(0.5**0.5, dtype=torch.float32, device="cpu")
        """Tensors, so that compiled steps can repeat the products."""

    def forward(self, token_ids_T: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """(T, layers of the stage, P).

        Args:
            embedded_TD: the tokens' embeddings as the model's first layer has them.
        """
        _, projected_NP = self.norm(self.projection(embedded_TD).view(-1, self._size))
        known_NP = self.table(token_ids_T).view(-1, self._size) * self._table_scale
        return ((projected_NP + known_NP) * self._mean_scale).view(len(token_ids_T), -1, self._size)


class PerLayerGate(nn.Module):
    """A layer's use of its input: ``norm(project(gelu(gate(hidden)) * input))``, with the GELU's tanh form."""

    def __init__(self, config: PerLayerEmbeddingConfig, hidden_size: int, norm_eps: float, ctx: StageContext):
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, config.size, ctx, "layer")
        self.projection = ReplicatedLinear(config.size, hidden_size, ctx, "layer")
        self.norm = RMSNorm(hidden_size, norm_eps, ctx)

    def forward(self, hidden_TD: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        """(T, D), (T, P) → (T, D), to be added to the hidden states."""
        gated_TP = F.gelu(self.gate(hidden_TD), approximate="tanh") * input_TP
        return self.norm(self.projection(gated_TP))[1]


class LayerScalar(WeightedModule):
    """A number that a layer's hidden states are multiplied with at its end."""

    def __init__(self, ctx: StageContext):
        super().__init__()
        self.value_1 = empty_parameter(1, dtype=ctx.dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD * self.value_1

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield TensorSlice(name=prefix, shape=(1,), destination=self.value_1)
