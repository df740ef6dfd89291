"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a state-space mixer with one state matrix per head."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.functions.delta_calls import CausalConvCall
from labinfer.functions.mamba_calls import GatedGroupNormCall, SelectiveScanCall
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.reference.elementwise import sigmoid
from labinfer.models.config_file import ConfigFile, show_value
from labinfer.models.families.layers.gated_delta import ConvWeight, DecayWeights, Part
from labinfer.models.layers.cache_spec import CacheSpec, StateTensor
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import MergedColumnParallelLinear, row_parallel
from labinfer.models.layers.sharding import HeadShard, shard_head_columns, shard_heads
from labinfer.weights.slices import Range, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter

INFINITY = float("inf")
MAMBA_PARTS = ("in_proj", "conv1d", "A_log", "dt_bias", "D", "norm", "out_proj")
"""Names of a Mamba-2 layer's modules and tensors in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Unsharded Mamba-2 layer."""

    num_heads: int
    num_groups: int
    """Number of groups, a divisor of ``num_heads``; the consecutive heads of a group share B and C."""
    head_size: int
    state_size: int
    conv_width: int
    """Kernel size of the causal convolution: tokens that it sees, the current one included."""
    norm_eps: float
    has_norm: bool = True
    """Whether the gated output is normalized, over each group."""
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    min_dt: float = 0.0
    max_dt: float = INFINITY
    multipliers: tuple[float, ...] = ()
    """Factors on z, x, B, C and dt, the parts of the input projection; empty for none."""

    def build(self, hidden_size: int, ctx: StageContext) -> Mamba:
        return Mamba(self, hidden_size, ctx)

    def with_window(self, window: int) -> MambaConfig:
        return self

    def check(self, tp_size: int) -> None:
        shard_heads(self.num_heads, self.num_groups, tp_size, 0, kind="Mamba")


def read_mamba(file: ConfigFile, inner_size: int, **fields: Any) -> MambaConfig:
    """Read a Mamba-2 layer from the config keys that begin with ``mamba_``.

    Args:
        inner_size: channels of x, over all heads.
        fields: fields of ``MambaConfig`` that these keys do not give.

    Raises:
        UserError: a key is missing or invalid.
    """
    heads, groups = file.size("mamba_n_heads", 128), file.size("mamba_n_groups", 1)
    file.require(heads % groups == 0, f"mamba_n_heads {heads} is not a multiple of mamba_n_groups {groups}")
    size = file.values.get("mamba_d_head", "auto")
    head_size = inner_size // heads if size in ("auto", None) else file.size("mamba_d_head")
    file.require(
        head_size * heads == inner_size,
        f"mamba_n_heads {heads} times mamba_d_head {show_value(size)} is not the {inner_size} channels of the layer",
    )
    min_dt, max_dt = _read_dt_limit(file)
    known = {
        "num_heads": heads,
        "num_groups": groups,
        "head_size": head_size,
        "state_size": file.size("mamba_d_state", 256),
        "conv_width": file.size("mamba_d_conv", 4),
        "norm_eps": file.get("rms_norm_eps", float, 1e-6),
        "conv_bias": file.get("mamba_conv_bias", bool, True),
        "min_dt": min_dt,
        "max_dt": max_dt,
    }
    return MambaConfig(**known | fields)


def _read_dt_limit(file: ConfigFile) -> tuple[float, float]:
    """Smallest and largest time step: ``time_step_limit``. Transformers 5 writes infinity as ``{"__float__": "Infinity"}``."""
    value = file.values.get("time_step_limit")
    limit = (0.0, INFINITY) if value is None else value
    if isinstance(limit, list | tuple):
        limit = [INFINITY if bound == {"__float__": "Infinity"} else bound for bound in limit]
    file.require(
        isinstance(limit, list | tuple)
        and len(limit) == 2
        and all(type(bound) in (int, float) for bound in limit)
        and 0 <= limit[0] <= limit[1],
        f"time_step_limit should be two numbers from 0 on, the smaller one first, not {show_value(value)}",
    )
    return float(limit[0]), float(limit[1])


@dataclass(frozen=True)
class MambaState:
    """State pools of a layer; dimension 0 indexes slots."""

    conv: torch.Tensor
    """Convolution state, (slots, W - 1, C): the last inputs of each channel."""
    ssm: torch.Tensor
    """State matrix of each head, (slots, H, N, P) float32."""


class Mamba(nn.Module):
    """This rank's heads, and the groups that serve them. A group whose heads are on several ranks is replicated on each of them."""

    rope = None

    def __init__(self, config: MambaConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self.config, self._functions, self._dtype = config, ctx.functions, ctx.dtype
        shard = shard_heads(config.num_heads, config.num_groups, ctx.tp.size, ctx.tp.rank)
        self._shard, inner = shard, config.num_heads * config.head_size
        channels = _channel_parts("conv1d", 0, inner + 2 * config.num_groups * config.state_size, config, shard)
        self._num_channels = sum(end - begin for _, _, (begin, end) in channels)
        parts = _input_parts(config, shard)
        self.in_proj = MergedColumnParallelLinear(hidden_size, parts, config.in_bias, ctx)
        edges = [0, *itertools.accumulate(end - begin for _, _, (begin, end) in parts)]
        factors = [torch.tensor(factor, dtype=torch.float32, device="cpu") for factor in config.multipliers]
        self._multipliers = [*zip(itertools.pairwise(edges), factors, strict=False)]
        """Column range and factor of each part of the input projection. Tensors, so that captured steps can replay the products."""
        self.conv1d = BiasedConvWeight(channels, config.conv_width, config.conv_bias)
        self.scan = ScanWeights(config.num_heads, shard.query)
        self.norm = GroupNorm(config, shard, ctx) if config.has_norm else None
        columns = partial(shard_head_columns, config.num_heads, config.num_groups, config.head_size)
        self.out_proj = row_parallel(inner, columns, hidden_size, config.out_bias, ctx)
        self._groups_H = torch.tensor(shard.kv_of_query, device="cpu")

    def calls(self) -> Iterator[FunctionCall]:
        config = self.config
        yield CausalConvCall(channels=self._num_channels, width=config.conv_width, has_bias=config.conv_bias)
        yield SelectiveScanCall(
            groups=self._shard.kv_of_query, state_size=config.state_size, head_size=config.head_size
        )
        if self.norm is not None and not self.norm.spans_ranks:
            yield GatedGroupNormCall(groups=self._shard.num_kv, size=self.out_proj.num_inputs // self._shard.num_kv)

    def cache_spec(self) -> CacheSpec:
        config = self.config
        conv = StateTensor(shape=(config.conv_width - 1, self._num_channels), dtype=self._dtype)
        ssm = StateTensor(shape=(self._shard.num_query, config.state_size, config.head_size))
        return CacheSpec(view=MambaState, per_sequence={"conv": conv, "ssm": ssm})

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: MambaState,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) for ``output_rows``; updates the state of each sequence."""
        functions, attention = self._functions, batch.attention
        inner, projected_TI = self.out_proj.num_inputs, self.in_proj(x_TD)
        if self._multipliers:
            projected_TI = torch.cat(
                [projected_TI[:, begin:end] * factor for (begin, end), factor in self._multipliers], dim=1
            )
        z_TI, dt_TH = projected_TI[:, :inner], projected_TI[:, inner + self._num_channels :]
        xbc_TC = projected_TI[:, inner : inner + self._num_channels]
        xbc_TC = functions.causal_conv(xbc_TC, self.conv1d.weight, cache.conv, attention, self.conv1d.bias)
        out_TI = functions.selective_scan(xbc_TC, dt_TH, cache.ssm, attention, self._heads).flatten(1)
        if output_rows is not None:
            if not len(output_rows.rows_R):
                return x_TD[:0]
            out_TI, z_TI = out_TI[output_rows.rows_R], z_TI[output_rows.rows_R]
        if self.norm is None:
            return self.out_proj(functions.silu_and_mul(torch.cat((z_TI, out_TI), dim=1)))
        return self.out_proj(self.norm(out_TI, z_TI))

    @cached_property
    def _heads(self) -> MambaHeads:
        """Argument of ``selective_scan``; built at the first step, as loading replaces the tensors of ``scan``."""
        return MambaHeads(
            rate_H=self.scan.rate_H,
            bias_H=self.scan.bias_H,
            skip_H=self.scan.skip_H,
            groups_H=self._groups_H,
            min_dt=self.config.min_dt,
            max_dt=self.config.max_dt,
        )


class BiasedConvWeight(ConvWeight):
    """Weight of a depthwise convolution, and its bias (``bias``, (C,) float32), if any."""

    def __init__(self, parts: list[Part], width: int, has_bias: bool):
        super().__init__(parts, width)
        self.bias = empty_parameter(self.weight.shape[0], dtype=torch.float32) if has_bias else None

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().slices(prefix)
        if self.bias is None:
            return
        first = 0
        for _, channels, (begin, end) in self._parts:
            here = self.bias[first : first + end - begin]
            yield TensorSlice(name=f"{prefix}.bias", shape=(channels,), ranges=((begin, end),), destination=here)
            first += end - begin


class ScanWeights(DecayWeights):
    """Decay rates, biases of the time step and skip factors of the heads, (H,) float32: see ``MambaHeads``."""

    def __init__(self, num_heads: int, heads: Range):
        super().__init__(num_heads, heads)
        self.skip_H = empty_parameter(heads[1] - heads[0], dtype=torch.float32)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().slices(prefix)
        name = f"{prefix.rpartition('.')[0]}.D"
        yield TensorSlice(name=name, shape=(self._num_heads,), ranges=(self._heads,), destination=self.skip_H)


class GroupNorm(WeightedModule):
    """SiLU gate, then RMS norm over each group of heads: ``gated_group_norm``.

    If a group's heads are on several ranks, or in a reproducible run, the ranks exchange the sum of squares of each head and add
    them in the order of the heads.
    """

    def __init__(self, config: MambaConfig, shard: HeadShard, ctx: StageContext):
        super().__init__()
        self._config, self._shard, self._tp = config, shard, ctx.tp
        self._gated_group_norm = ctx.functions.gated_group_norm
        self.spans_ranks = ctx.tp.size > config.num_groups or ctx.row_parallel is not None
        """Whether ``forward`` exchanges sums between ranks instead of calling ``gated_group_norm``."""
        self.weight = empty_parameter(shard.num_query * config.head_size, dtype=ctx.dtype)

    def forward(self, x_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """Gate and normalize this rank's columns, (T, I)."""
        config, (begin, end) = self._config, self._shard.query
        if not self.spans_ranks:
            return self._gated_group_norm(x_TI, gate_TI, self.weight, self._shard.num_kv, config.norm_eps)
        gate_TI = gate_TI.float()
        gated_THP = (x_TI.float() * gate_TI * sigmoid(gate_TI)).unflatten(1, (-1, config.head_size))
        squares_TH = gated_THP.new_zeros(len(x_TI), config.num_heads)
        squares_TH[:, begin:end] = gated_THP.square().sum(dim=2)
        heads_per_group = config.num_heads // config.num_groups
        sums_TG = self._tp.all_reduce(squares_TH).unflatten(1, (config.num_groups, heads_per_group)).sum(dim=2)
        scale_TG = torch.rsqrt(sums_TG / (heads_per_group * config.head_size) + config.norm_eps)
        scale_TH = scale_TG.repeat_interleave(heads_per_group, dim=1)[:, begin:end]
        return ((gated_THP * scale_TH.unsqueeze(2)).flatten(1) * self.weight.float()).to(x_TI.dtype)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        size, (begin, end) = self._config.head_size, self._shard.query
        shape, columns = (self._config.num_heads * size,), (begin * size, end * size)
        yield TensorSlice(name=f"{prefix}.weight", shape=shape, ranges=(columns,), destination=self.weight)


# Rows of the checkpoint's tensors for this rank's heads and groups.


def _channel_parts(name: str, first: int, total: int, config: MambaConfig, shard: HeadShard) -> list[Part]:
    """This rank's channels in a tensor of ``total`` rows that stores all x, then all B, then all C, from row ``first`` on."""
    inner, states = config.num_heads * config.head_size, config.num_groups * config.state_size
    x, groups = (edge * config.head_size for edge in shard.query), [edge * config.state_size for edge in shard.kv]
    begins = (first, first + inner, first + inner + states)
    return [
        (name, total, (row + begin, row + end)) for row, (begin, end) in zip(begins, (x, groups, groups), strict=True)
    ]


def _input_parts(config: MambaConfig, shard: HeadShard) -> list[Part]:
    """This rank's rows of the input projection: z, x, B, C, dt."""
    inner, states = config.num_heads * config.head_size, config.num_groups * config.state_size
    first_dt = 2 * inner + 2 * states
    total = first_dt + config.num_heads
    begin, end = shard.query
    return [
        ("in_proj", total, (begin * config.head_size, end * config.head_size)),
        *_channel_parts("in_proj", inner, total, config, shard),
        ("in_proj", total, (first_dt + begin, first_dt + end)),
    ]
