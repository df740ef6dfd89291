"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): one latent per token holds the keys and values of all heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from labinfer.base.errors import UserError
from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.functions.latent_cache import LatentCache, LatentTransform
from labinfer.functions.latent_calls import LatentAttentionCall, LatentSizes, WriteLatentCall
from labinfer.models.layers.cache_spec import CacheSpec, TokenTensor
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import MergedColumnParallelLinear, row_parallel
from labinfer.models.layers.norm import NormWeight, RMSNorm
from labinfer.models.layers.rope import RopeConfig
from labinfer.models.layers.sharding import shard_head_columns, shard_heads
from labinfer.weights.slices import MatrixSlice, Range, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Unsharded latent-attention layer."""

    num_heads: int
    query_rank: int
    """Rank of the low-rank query projection; 0 if queries are projected from the hidden state directly."""
    rank: int
    """Size of a token's latent, L."""
    unrotated: int
    """Dimensions of a head's queries and keys without position encoding, N; ``rope.dim`` more are rotated."""
    value_size: int
    rope: RopeConfig
    scale: float
    """Factor on the attention scores."""
    bias: bool = False
    """Whether the down-projections of hidden states and ``o_proj`` have biases."""
    norm_eps: float = 1e-6

    def build(self, hidden_size: int, ctx: StageContext) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(self, hidden_size, ctx)

    def with_window(self, window: int) -> LatentAttentionConfig:
        raise UserError(f"--sliding-window {window}: this model's latent attention has no windows; leave it out")

    def check(self, tp_size: int) -> None:
        shard_heads(self.num_heads, 1, tp_size, 0)

    @property
    def query_size(self) -> int:
        return self.unrotated + self.rope.dim


class MultiHeadLatentAttention(nn.Module):
    """This rank's heads of a latent-attention layer. The latent is replicated: every rank computes and caches it for each token, as all heads share it."""

    def __init__(self, config: LatentAttentionConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self.config, self._functions = config, ctx.functions
        self.rope = config.rope
        heads = shard_heads(config.num_heads, 1, ctx.tp.size, ctx.tp.rank).query
        self._num_heads = heads[1] - heads[0]
        kv = _whole("kv_a_proj_with_mqa", config.rank + config.rope.dim)
        queries = config.num_heads * config.query_size, _columns(heads, config.query_size)
        if config.query_rank:
            query = _whole("q_a_proj", config.query_rank)
            self.a_proj = MergedColumnParallelLinear(hidden_size, [query, kv], config.bias, ctx)
            self.q_a_layernorm = RMSNorm(config.query_rank, config.norm_eps, ctx)
            self.q_b_proj = MergedColumnParallelLinear(config.query_rank, [("q_b_proj", *queries)], False, ctx)
        else:  # two products, as only one of them may have a bias
            self.q_proj = MergedColumnParallelLinear(hidden_size, [("q_proj", *queries)], False, ctx)
            self.kv_a_proj_with_mqa = MergedColumnParallelLinear(hidden_size, [kv], config.bias, ctx)
        self.kv_a_layernorm = NormWeight(config.rank, ctx)
        self.kv_b_proj = HeadWeights(
            config.num_heads, heads, config.unrotated + config.value_size, config.rank, ctx=ctx
        )
        shard = partial(shard_head_columns, config.num_heads, 1, config.value_size)
        self.o_proj = row_parallel(config.num_heads * config.value_size, shard, hidden_size, config.bias, ctx)

    def calls(self) -> Iterator[FunctionCall]:
        config, sizes = self.config, vars(self._sizes)
        yield WriteLatentCall(**sizes, interleaved=config.rope.interleaved)
        yield LatentAttentionCall(**sizes)

    @property
    def _sizes(self) -> LatentSizes:
        config = self.config
        return LatentSizes(
            heads=self._num_heads,
            rank=config.rank,
            rotated=config.rope.dim,
            unrotated=config.unrotated,
            value_size=config.value_size,
        )

    def cache_spec(self) -> CacheSpec:
        config = self.config
        latent = TokenTensor(
            shape=(config.rank + config.rope.dim,),
            rope=config.rope,
            rope_begin=config.rank,
            parts=(config.rank, config.rope.dim),
            is_replicated=True,
        )
        return CacheSpec(view=partial(LatentCache, rank=config.rank), per_token={"latent": latent})

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: LatentCache,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) for ``output_rows``; writes the new tokens' latents into ``cache``."""
        config, functions = self.config, self._functions
        q_TI, kv_TC = self._project(x_TD)
        q_THQ = q_TI.view(-1, self._num_heads, config.query_size)
        q_THQ = functions.write_latent(q_THQ, kv_TC, cache, batch.slots_T, angles, transform=self._transform)
        attention = batch.attention
        if output_rows is not None:
            if not len(output_rows.rows_R):
                return x_TD[:0]
            attention, q_THQ = output_rows.attention, q_THQ[output_rows.rows_R]
        out_THP = functions.latent_attention(q_THQ, cache, attention, self.kv_b_proj.weight, config.scale)
        return self.o_proj(out_THP.flatten(1))

    @cached_property
    def _transform(self) -> LatentTransform:
        """Argument of ``write_latent``; built at the first step, as loading replaces the tensor of the norm."""
        return LatentTransform(self.kv_a_layernorm.weight, self.config.norm_eps, self.config.rope.interleaved)

    def _project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of this rank's heads, and each token's latent with the rotary part of its key, before the rotation."""
        if not self.config.query_rank:
            return self.q_proj(x_TD), self.kv_a_proj_with_mqa(x_TD)
        both_TI = self.a_proj(x_TD)
        _, a_TI = self.q_a_layernorm(both_TI[:, : self.config.query_rank].contiguous())
        return self.q_b_proj(a_TI), both_TI[:, self.config.query_rank :]


class HeadWeights(WeightedModule):
    """Up-projections of this rank's heads, from a latent to keys and values: (H, U, L), never quantized.

    Args:
        size: rows of a head, U: for its keys, then for its values.
    """

    def __init__(self, num_heads: int, heads: Range, size: int, rank: int, *, ctx: StageContext):
        super().__init__()
        self._num_rows, self._rows = num_heads * size, _columns(heads, size)
        self.weight = empty_parameter(heads[1] - heads[0], size, rank, dtype=ctx.dtype)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        rank = self.weight.shape[2]
        yield MatrixSlice(
            name=prefix,
            outputs=self._num_rows,
            inputs=rank,
            rows=self._rows,
            columns=(0, rank),
            destination=self.weight.view(-1, rank),
        )


def _whole(name: str, size: int) -> tuple[str, int, Range]:
    """Name, size and range of a projection that is replicated on every rank."""
    return name, size, (0, size)


def _columns(heads: Range, size: int) -> Range:
    return heads[0] * size, heads[1] * size
