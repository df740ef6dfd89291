"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a linear-attention mixer with one state matrix per head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.functions.delta_calls import CausalConvCall, DeltaRuleCall, GatedNormCall
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.models.layers.cache_spec import CacheSpec, StateTensor
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import MergedColumnParallelLinear, row_parallel
from labinfer.models.layers.norm import NormWeight
from labinfer.models.layers.sharding import HeadShard, shard_head_columns, shard_heads
from labinfer.weights.slices import Range, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter

Part = tuple[str, int, Range]
"""Name of a stored tensor, its number of rows, and a range of these rows."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Unsharded Gated DeltaNet layer."""

    num_key_heads: int
    """Number of key heads, and of query heads."""
    num_value_heads: int
    """Multiple of ``num_key_heads``; a key head serves consecutive value heads."""
    key_size: int
    value_size: int
    conv_width: int
    """Kernel size of the causal convolution: tokens that it sees, the current one included."""
    norm_eps: float
    stored_by_key_head: bool = False
    """Whether the checkpoint stores ``in_proj_qkvz`` and ``in_proj_ba``, with the rows grouped by key head, instead of ``in_proj_qkv``,
    ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``."""

    def build(self, hidden_size: int, ctx: StageContext) -> GatedDeltaNet:
        return GatedDeltaNet(self, hidden_size, ctx)

    def with_window(self, window: int) -> GatedDeltaConfig:
        return self

    def check(self, tp_size: int) -> None:
        shard_heads(self.num_value_heads, self.num_key_heads, tp_size, 0, kind="value")


@dataclass(frozen=True)
class DeltaState:
    """State pools of a layer; dimension 0 indexes slots."""

    conv: torch.Tensor
    """Convolution state, (slots, W - 1, C): the last inputs of each channel."""
    delta: torch.Tensor
    """State matrix of each value head, (slots, H, key size, P) float32."""


class GatedDeltaNet(nn.Module):
    """This rank's value heads, and the key heads that serve them."""

    rope = None

    def __init__(self, config: GatedDeltaConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self.config, self._functions, self._dtype = config, ctx.functions, ctx.dtype
        shard = shard_heads(config.num_value_heads, config.num_key_heads, ctx.tp.size, ctx.tp.rank)
        self._shard, self._num_values = shard, shard.num_query * config.value_size
        self.in_proj = MergedColumnParallelLinear(hidden_size, _input_parts(config, shard), False, ctx)
        self.gates = MergedColumnParallelLinear(hidden_size, _gate_parts(config, shard), False, ctx, "exact")
        self.conv1d = ConvWeight(_channel_parts("conv1d", config, shard), config.conv_width)
        self.decay = DecayWeights(config.num_value_heads, shard.query)
        self.norm = NormWeight(config.value_size, ctx)
        columns = partial(shard_head_columns, config.num_value_heads, config.num_key_heads, config.value_size)
        self.out_proj = row_parallel(config.num_value_heads * config.value_size, columns, hidden_size, False, ctx)
        self._key_heads_H = torch.tensor(shard.kv_of_query, device="cpu")

    def calls(self) -> Iterator[FunctionCall]:
        config = self.config
        yield CausalConvCall(channels=self._num_channels, width=config.conv_width)
        yield DeltaRuleCall(key_heads=self._shard.kv_of_query, key_size=config.key_size, value_size=config.value_size)
        yield GatedNormCall(heads=self._shard.num_query, size=config.value_size)

    def cache_spec(self) -> CacheSpec:
        config = self.config
        conv = StateTensor(shape=(config.conv_width - 1, self._num_channels), dtype=self._dtype)
        delta = StateTensor(shape=(self._shard.num_query, config.key_size, config.value_size))
        return CacheSpec(view=DeltaState, per_sequence={"conv": conv, "delta": delta})

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: DeltaState,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) for ``output_rows``; updates the state of each sequence."""
        functions, attention = self._functions, batch.attention
        projected_TI = self.in_proj(x_TD)
        qkv_TC, z_TI = projected_TI[:, : -self._num_values], projected_TI[:, -self._num_values :]
        qkv_TC = functions.causal_conv(qkv_TC, self.conv1d.weight, cache.conv, attention)
        out_THP = functions.delta_rule(qkv_TC, self.gates(x_TD), cache.delta, attention, self._heads)
        z_THP = z_TI.unflatten(1, (-1, self.config.value_size))
        if output_rows is not None:
            if not len(output_rows.rows_R):
                return x_TD[:0]
            out_THP, z_THP = out_THP[output_rows.rows_R], z_THP[output_rows.rows_R]
        out_THP = functions.gated_norm(out_THP, z_THP, self.norm.weight, self.config.norm_eps)
        return self.out_proj(out_THP.flatten(1))

    @cached_property
    def _heads(self) -> DeltaHeads:
        """Argument of ``delta_rule``; built at the first step, as loading replaces the tensors of ``decay``."""
        return DeltaHeads(self.decay.rate_H, self.decay.bias_H, self._key_heads_H)

    @property
    def _num_channels(self) -> int:
        """Channels of the convolution, C: queries, keys and values of this rank's heads."""
        return 2 * self._shard.num_kv * self.config.key_size + self._num_values


class ConvWeight(WeightedModule):
    """Weight of a depthwise convolution, (W, C) float32: one row per tap, the last for the current token.

    Args:
        parts: this rank's channels.
    """

    def __init__(self, parts: list[Part], width: int):
        super().__init__()
        self._parts = parts
        self.weight = empty_parameter(sum(end - begin for _, _, (begin, end) in parts), 1, width, dtype=torch.float32)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        first = 0
        for _, channels, (begin, end) in self._parts:
            here = self.weight[first : first + end - begin]
            shape = (channels, *self.weight.shape[1:])
            yield TensorSlice(name=f"{prefix}.weight", shape=shape, ranges=((begin, end),), destination=here)
            first += end - begin

    def pack(self) -> None:
        self.weight = nn.Parameter(self.weight[:, 0].t().contiguous(), requires_grad=False)


class DecayWeights(WeightedModule):
    """Decay rates of the value heads, and their biases, (H,) float32: see ``family_protocols.DeltaRule``."""

    def __init__(self, num_heads: int, heads: Range):
        super().__init__()
        self._num_heads, self._heads = num_heads, heads
        self.rate_H, self.bias_H = (empty_parameter(heads[1] - heads[0], dtype=torch.float32) for _ in range(2))

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent = prefix.rpartition(".")[0]
        for name, destination in (("A_log", self.rate_H), ("dt_bias", self.bias_H)):
            yield TensorSlice(
                name=f"{parent}.{name}", shape=(self._num_heads,), ranges=(self._heads,), destination=destination
            )

    def pack(self) -> None:
        self.rate_H.exp_()  # the checkpoint stores the logarithm of the rate


# Rows of the checkpoint's tensors for this rank's heads.


def _channel_parts(name: str, config: GatedDeltaConfig, shard: HeadShard) -> list[Part]:
    """This rank's channels in a tensor that stores all queries, then all keys, then all values."""
    keys = config.num_key_heads * config.key_size
    total = 2 * keys + config.num_value_heads * config.value_size
    queries = [key * config.key_size for key in range(*shard.kv)]
    values = [2 * keys + head * config.value_size for head in range(*shard.query)]
    return [
        *_join(name, total, queries, config.key_size),
        *_join(name, total, [keys + begin for begin in queries], config.key_size),
        *_join(name, total, values, config.value_size),
    ]


def _input_parts(config: GatedDeltaConfig, shard: HeadShard) -> list[Part]:
    """This rank's rows of the input projection: queries, keys, values, and z (the output gate)."""
    key_size, value_size, heads = config.key_size, config.value_size, range(*shard.query)
    if not config.stored_by_key_head:
        z = _join("in_proj_z", config.num_value_heads * value_size, [head * value_size for head in heads], value_size)
        return [*_channel_parts("in_proj_qkv", config, shard), *z]
    group = config.num_value_heads // config.num_key_heads
    step = 2 * key_size + 2 * group * value_size
    stored = "in_proj_qkvz", config.num_key_heads * step
    queries = [key * step for key in range(*shard.kv)]
    values = [head // group * step + 2 * key_size + head % group * value_size for head in heads]
    return [
        *_join(*stored, queries, key_size),
        *_join(*stored, [begin + key_size for begin in queries], key_size),
        *_join(*stored, values, value_size),
        *_join(*stored, [begin + group * value_size for begin in values], value_size),
    ]


def _gate_parts(config: GatedDeltaConfig, shard: HeadShard) -> list[Part]:
    """This rank's rows of the projections to b (step size) and a (decay): b of each value head, then a of each value head."""
    if not config.stored_by_key_head:
        return [(name, config.num_value_heads, shard.query) for name in ("in_proj_b", "in_proj_a")]
    group = config.num_value_heads // config.num_key_heads
    stored = "in_proj_ba", 2 * config.num_value_heads
    b = [head // group * 2 * group + head % group for head in range(*shard.query)]
    return [*_join(*stored, b, 1), *_join(*stored, [row + group for row in b], 1)]


def _join(name: str, total: int, begins: Iterable[int], size: int) -> list[Part]:
    """Row ranges of length ``size`` from ``begins``, with adjacent ones merged."""
    parts: list[Part] = []
    for begin in begins:
        first = parts.pop()[2][0] if parts and parts[-1][2][1] == begin else begin
        parts.append((name, total, (first, begin + size)))
    return parts
