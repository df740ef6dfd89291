"""``NarrowValueAttention``: attention whose values are narrower than its queries and keys (MiMo-V2-Flash).

The KV cache stores values that are zero-padded to the size of the keys, so that every implementation of attention computes them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.functions.attention_batch import Angles
from labinfer.functions.layer_cache import LayerCache
from labinfer.models.layers.attention import Attention, AttentionConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import MergedColumnParallelLinear, row_parallel
from labinfer.models.layers.sharding import shard_head_columns


@dataclass(frozen=True, kw_only=True)
class NarrowValueAttentionConfig(AttentionConfig):
    """Unsharded attention with values of ``value_size``, less than ``head_size``; without output gate and tied values."""

    value_size: int
    value_scale: float = 1.0
    """Factor on the values."""

    def build(self, hidden_size: int, ctx: StageContext) -> NarrowValueAttention:
        return NarrowValueAttention(self, hidden_size, ctx)


class NarrowValueAttention(Attention):
    """This rank's heads of the attention."""

    def __init__(self, config: NarrowValueAttentionConfig, hidden_size: int, ctx: StageContext):
        super().__init__(config, hidden_size, ctx)
        heads, kv_heads, shard = config.num_heads, config.num_kv_heads, self.shard
        parts = [
            (name, count * size, (begin * size, end * size))
            for name, count, (begin, end), size in (
                ("q_proj", heads, shard.query, config.head_size),
                ("k_proj", kv_heads, shard.kv, config.head_size),
                ("v_proj", kv_heads, shard.kv, config.value_size),
            )
        ]
        self.qkv_proj = MergedColumnParallelLinear(hidden_size, parts, config.qkv_bias, ctx)
        shard_inputs = partial(shard_head_columns, heads, kv_heads, config.value_size)
        self.o_proj = row_parallel(heads * config.value_size, shard_inputs, hidden_size, config.out_bias, ctx)

    def _normalized(self, qkv_TI: torch.Tensor) -> torch.Tensor:
        config = self.config
        return pad_values(qkv_TI, (self.shard.num_kv, config.value_size, config.head_size), config.value_scale)

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
        out_THP = out_TI.view(len(out_TI), -1, self.config.head_size)[..., : self.config.value_size]
        return out_THP.contiguous().view(len(out_TI), -1)


def pad_values(
    qkv_TI: torch.Tensor, sizes: tuple[int, int, int], scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the values, which are the last columns, by ``scale``, and zero-pad each head of them.

    Args:
        sizes: number of KV heads, size of a head's value, and size to which it is padded.
    """
    num_kv, narrow, wide = sizes
    num_others = qkv_TI.shape[1] - num_kv * narrow
    out = qkv_TI.new_empty(len(qkv_TI), num_others + num_kv * wide) if out is None else out
    if has_torch_function((qkv_TI,)):  # a capture records this as one torch operation
        return handle_torch_function(pad_values, (qkv_TI,), qkv_TI, sizes, scale, out)
    out[:, :num_others] = qkv_TI[:, :num_others]
    values_TKP = out[:, num_others:].unflatten(1, (num_kv, wide))
    values_TKP[..., narrow:] = 0
    values_TKP[..., :narrow] = qkv_TI[:, num_others:].unflatten(1, (num_kv, narrow)) * scale
    return out


pad_values.repeats_in_place = True
