"""Self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.functions.attention_heads import AttentionHeads, HeadNorms, QKVHeads
from labinfer.functions.calls import FunctionCall, PagedAttentionCall, RotateAndWriteCall
from labinfer.functions.layer_cache import LayerCache, PoolLayout
from labinfer.functions.reference.elementwise import sigmoid
from labinfer.models.layers.cache_spec import CacheSpec, TokenTensor
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import QKVParallelLinear, row_parallel
from labinfer.models.layers.norm import NormWeight
from labinfer.models.layers.rope import RopeConfig
from labinfer.models.layers.sharding import shard_head_columns, shard_heads
from labinfer.weights.slices import TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter

QKNorm = Literal["none", "head", "head_after_rotation"]
"""QK norm: none, or per head, before or after the rotation."""


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Query scaling by ``1 + beta * ln(1 + floor(position / original_length))``, which keeps attention sharp in long contexts.

    As in Transformers' Ministral 3 (``get_llama_4_attn_scale``); the rule is Llama 4's.
    """

    beta: float
    original_length: int

    def __call__(self, positions_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Factor of each token's query, (T, 1, 1)."""
        return (1 + self.beta * torch.log(1 + positions_T // self.original_length)).to(dtype).view(-1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Unsharded grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of one layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeConfig | None
    """Rotary embedding; None for layers without position encoding."""
    qkv_bias: bool = False
    out_bias: bool = False
    window: int = 0
    """Sliding-window size in tokens, the token's own included; 0 for full attention."""
    qk_norm: QKNorm = "none"
    qk_norm_eps: float = 1e-6
    qk_norm_offset: float = 0.0
    """Offset on the weights of per-head QK norms."""
    value_norm: bool = False
    """Whether value heads are normalized too, without a weight; requires a per-head ``qk_norm``."""
    tied_values: bool = False
    """Whether values are the output of the key projection, before its norm and rotation."""
    reads_earlier: bool = False
    """Whether the layer uses the keys and values of an earlier layer, see ``LayerConfig.cache_layer``, and projects only queries."""
    output_gate: bool = False
    """Whether each head's output is multiplied by a sigmoid gate, whose rows follow the head's query rows in ``q_proj``
    (Qiu et al. 2025, arXiv:2505.06708)."""
    query_scaling: QueryScaling | None = None
    scale: float | None = None
    """Factor on the attention scores; None for ``head_size ** -0.5``."""
    sinks: bool = False
    """Whether each head has a learned attention-sink logit."""
    score_cap: float = 0.0
    """Soft cap of the attention scores, see ``AttentionHeads.cap``; 0 for no cap."""

    def build(self, hidden_size: int, ctx: StageContext) -> Attention:
        return Attention(self, hidden_size, ctx)

    def with_window(self, window: int) -> AttentionConfig:
        return replace(self, window=window)

    def check(self, tp_size: int) -> None:
        shard_heads(self.num_heads, self.num_kv_heads, tp_size, 0)


class Attention(nn.Module):
    """This rank's heads of an attention layer."""

    def __init__(self, config: AttentionConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self.config, self._functions = config, ctx.functions
        self.rope = config.rope
        size = config.head_size
        self.shard = shard = shard_heads(config.num_heads, config.num_kv_heads, ctx.tp.size, ctx.tp.rank)
        self._num_new = 0 if config.reads_earlier else shard.num_kv
        """KV heads that this layer writes to the cache."""
        kv_names = () if config.reads_earlier else ("k_proj", "k_proj" if config.tied_values else "v_proj")
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=size,
            shard=shard,
            bias=config.qkv_bias,
            ctx=ctx,
            kv_names=kv_names,
            output_gate=config.output_gate,
        )
        shard_inputs = partial(shard_head_columns, config.num_heads, config.num_kv_heads, size)
        self.o_proj = row_parallel(config.num_heads * size, shard_inputs, hidden_size, config.out_bias, ctx)
        if config.qk_norm != "none":
            self.q_norm = NormWeight(size, ctx, config.qk_norm_offset)
            self.k_norm = self.q_norm if config.reads_earlier else NormWeight(size, ctx, config.qk_norm_offset)
        self._scale = config.head_size**-0.5 if config.scale is None else config.scale
        self.sinks = HeadLogits(config.num_heads, shard.query) if config.sinks else None
        self._head_ptr = torch.tensor(shard.head_ptr, device="cpu")

    def calls(self) -> Iterator[FunctionCall]:
        config, shard = self.config, self.shard
        norms = {"head": "before", "head_after_rotation": "after"}.get(config.qk_norm, "none")
        yield RotateAndWriteCall(
            heads=shard.num_query,
            kv_heads=self._num_new,
            head_size=config.head_size,
            rotary_size=self.rope.dim if self.rope is not None else 0,
            interleaved=self.rope is not None and self.rope.interleaved,
            norms=norms,
            value_norm=config.value_norm,
        )
        yield PagedAttentionCall(
            head_ptr=shard.head_ptr,
            head_size=config.head_size,
            window=config.window,
            sinks=config.sinks,
            cap=config.score_cap,
        )

    def cache_spec(self) -> CacheSpec:
        if self.config.reads_earlier:
            return CacheSpec(view=lambda: None)
        spec = key_value_spec(self.shard.num_kv, self.config.head_size, self.rope, tiled=self._functions.tiled_cache)
        spec = replace(spec, window=self.config.window)
        if self.config.qk_norm != "head_after_rotation":
            return spec
        return replace(spec, per_token=spec.per_token | {"k": replace(spec.per_token["k"], can_turn=False)})

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: LayerCache,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) for ``output_rows``; writes the new tokens' keys and values into ``cache``."""
        heads_TI = self.attend(x_TD, batch, cache, angles, output_rows)
        return self.o_proj(heads_TI) if len(heads_TI) else x_TD[:0]

    def attend(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: LayerCache,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """Inputs of ``o_proj``: outputs of this rank's heads, (T, H * P), or (R, H * P) for ``output_rows``."""
        config, functions = self.config, self._functions
        windowed = batch.windowed if config.window else None
        source = batch if windowed is None else windowed
        slots_T, attention = source.slots_T, source.attention
        qkv_TI, gate_TI = self.qkv_proj(x_TD), None
        if config.output_gate:
            columns = self.o_proj.num_inputs
            qkv_TI, gate_TI = qkv_TI[:, :-columns].contiguous(), qkv_TI[:, -columns:]
        qkv_THP = self._normalized(qkv_TI).view(x_TD.shape[0], -1, config.head_size)
        q_THP = functions.rotate_and_write(qkv_THP, cache, slots_T, angles, self._qkv_heads)
        if config.query_scaling is not None:
            q_THP = q_THP * config.query_scaling(batch.positions_T, q_THP.dtype)
        if output_rows is not None:
            if not len(output_rows.rows_R):
                return x_TD.new_empty(0, self.o_proj.num_inputs)
            attention = output_rows.attention if windowed is None else output_rows.windowed
            q_THP = q_THP[output_rows.rows_R]
            gate_TI = None if gate_TI is None else gate_TI[output_rows.rows_R]
        out_THP = functions.paged_attention(q_THP, cache, attention, self._attention_heads)
        out_TI = out_THP.reshape(q_THP.shape[0], -1)
        return out_TI if gate_TI is None else out_TI * sigmoid(gate_TI)

    @cached_property
    def _qkv_heads(self) -> QKVHeads:
        """Argument of ``rotate_and_write``; built at the first step, as loading replaces the tensors of the norms."""
        interleaved = self.rope is not None and self.rope.interleaved
        return QKVHeads(self._num_new, interleaved, self._head_norms())

    @cached_property
    def _attention_heads(self) -> AttentionHeads:
        """Argument of ``paged_attention``; built at the first step, as loading replaces the tensor of ``sinks``."""
        sinks_H = None if self.sinks is None else self.sinks.logits_H
        return AttentionHeads(self._head_ptr, self._scale, self.config.window, sinks_H, self.config.score_cap)

    def _head_norms(self) -> HeadNorms | None:
        config = self.config
        if config.qk_norm == "none":
            return None
        after = config.qk_norm == "head_after_rotation"
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, config.qk_norm_eps, after, config.value_norm)

    def _normalized(self, qkv_TI: torch.Tensor) -> torch.Tensor:
        """Hook: queries, keys and values of this rank, (T, I), before the rotation. May overwrite ``qkv_TI``."""
        return qkv_TI


class HeadLogits(WeightedModule):
    """A float32 logit for each of this rank's query heads."""

    def __init__(self, num_heads: int, heads: tuple[int, int]):
        super().__init__()
        self._num_heads, self._heads = num_heads, heads
        self.logits_H = empty_parameter(heads[1] - heads[0], dtype=torch.float32)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield TensorSlice(name=prefix, shape=(self._num_heads,), ranges=(self._heads,), destination=self.logits_H)


def key_value_spec(num_kv: int, head_size: int, rope: RopeConfig | None, tiled: bool = False) -> CacheSpec:
    """Cache spec of keys and values of ``num_kv`` heads; ``tiled`` asks for tiled pools, if block and head size allow."""
    shape = (num_kv, head_size)
    layouts = (PoolLayout.KEY_TILES, PoolLayout.VALUE_TILES) if tiled else (PoolLayout.ROWS, PoolLayout.ROWS)
    per_token = {
        "k": TokenTensor(shape=shape, rope=rope, layout=layouts[0]),
        "v": TokenTensor(shape=shape, layout=layouts[1]),
    }
    return CacheSpec(view=LayerCache, per_token=per_token)
