"""PerLayerEmbeddingDecoder: a decoder with per-layer embeddings and a scalar for each layer (Gemma 4)."""

from __future__ import annotations

from typing import Any

import torch

from labinfer.functions.attention_batch import Angles
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.decoder import Decoder, DecoderLayer, NormPlacement
from labinfer.models.families.layers.per_layer_embedding import LayerScalar, PerLayerEmbedding, PerLayerGate
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows


class LayerWithInput(DecoderLayer):
    """A decoder layer, followed by the gate of its per-layer embedding (if any) and a multiplication with its learned scalar."""

    def __init__(self, layer: LayerConfig, config: ModelConfig, placement: NormPlacement, ctx: StageContext):
        super().__init__(layer, config, placement, ctx)
        self.layer_input = None
        if (inputs := config.layer_inputs) is not None:
            self.layer_input = PerLayerGate(inputs, config.hidden_size, config.norm_eps, ctx)
        self.layer_scalar = LayerScalar(ctx)

    def forward(
        self,
        hidden_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        batch: ModelInputBatch,
        cache: Any,
        angles: Angles | None,
        *,
        output_rows: OutputRows | None = None,
        input_TP: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``DecoderLayer.forward`` with a per-layer embedding.

        Args:
            input_TP: per-layer embedding of each token; None if the model has none.
        """
        hidden_TD, delta_TD = super().forward(hidden_TD, delta_TD, batch, cache, angles, output_rows=output_rows)
        if not len(hidden_TD):
            return hidden_TD, delta_TD
        if self.layer_input is not None:
            hidden_TD = hidden_TD + delta_TD
            delta_TD = self.layer_input(hidden_TD, input_TP if output_rows is None else input_TP[output_rows.rows_R])
        return self.layer_scalar(hidden_TD), self.layer_scalar(delta_TD)


class PerLayerEmbeddingDecoder(Decoder):
    """Decoder with per-layer embeddings: a stage also sends the token embeddings to the next one, after the hidden states, (T, 2D)."""

    layer_class = LayerWithInput

    def add_parts(self, config: ModelConfig, ctx: StageContext) -> None:
        self.model.layer_inputs = None
        if (inputs := config.layer_inputs) is not None:
            self.model.layer_inputs = PerLayerEmbedding(inputs, config.hidden_size, config.norm_eps, ctx)

    def run_layers(
        self,
        batch: ModelInputBatch,
        hidden_TD: torch.Tensor,
        caches: list[Any],
        inputs_TLP: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.model.layer_inputs is None:
            return super().run_layers(batch, hidden_TD, caches)
        embedded_TD = hidden_TD
        if not self._ctx.is_first:
            width = self._config.hidden_size
            # Slices, not torch.split: a captured step may have views, but no operation with several results.
            hidden_TD, embedded_TD = hidden_TD[:, :width].contiguous(), hidden_TD[:, width:].contiguous()
        elif not self._ctx.is_last:
            embedded_TD = hidden_TD.clone()  # a norm may overwrite hidden_TD
        inputs_TLP = self.model.layer_inputs(batch.token_ids_T, embedded_TD)
        hidden_TD = super().run_layers(batch, hidden_TD, caches, inputs_TLP)
        return hidden_TD if self._ctx.is_last else torch.cat((hidden_TD, embedded_TD), dim=1)
