"""``HeadGateAttention``: attention whose heads are each multiplied by a sigmoid gate, one number per head and token (Step-3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.functions.attention_batch import Angles
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference.elementwise import sigmoid
from labinfer.models.layers.attention import Attention, AttentionConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import ReplicatedLinear


@dataclass(frozen=True, kw_only=True)
class HeadGateAttentionConfig(AttentionConfig):
    """Unsharded attention with a gate for each head, projected from the layer's input by ``g_proj``."""

    def build(self, hidden_size: int, ctx: StageContext) -> HeadGateAttention:
        return HeadGateAttention(self, hidden_size, ctx)


class HeadGateAttention(Attention):
    """This rank's heads of the attention, and their gates."""

    def __init__(self, config: HeadGateAttentionConfig, hidden_size: int, ctx: StageContext):
        super().__init__(config, hidden_size, ctx)
        self.g_proj = ReplicatedLinear(hidden_size, config.num_heads, ctx, outputs=self.shard.query)

    def attend(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: LayerCache,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        out_TI = super().attend(x_TD, batch, cache, angles, output_rows)
        if not len(out_TI):
            return out_TI
        gates_TH = sigmoid(self.g_proj(x_TD if output_rows is None else x_TD[output_rows.rows_R]))
        out_THP = out_TI.view(len(out_TI), -1, self.config.head_size)
        return (out_THP * gates_TH.unsqueeze(-1)).view(out_TI.shape)
