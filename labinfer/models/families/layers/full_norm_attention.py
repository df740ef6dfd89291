"""``FullNormAttention``: attention whose queries and keys are normalized over the heads of all ranks (OLMo 2 and 3, MiniMax-M2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from labinfer.models.layers.attention import Attention, AttentionConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.sharding import shard_heads
from labinfer.weights.slices import Range, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class FullNormAttentionConfig(AttentionConfig):
    """Attention with an RMS norm over all query heads together and one over all key heads, before the rotation."""

    def build(self, hidden_size: int, ctx: StageContext) -> FullNormAttention:
        return FullNormAttention(self, hidden_size, ctx)


def full_norm(config: AttentionConfig) -> FullNormAttentionConfig:
    """``config`` with norms over all heads."""
    return FullNormAttentionConfig(**vars(config))


class FullNormAttention(Attention):
    """This rank's heads of the attention. Each head's sum of squares is computed by one rank, and all ranks add the sums in the order of the heads."""

    def __init__(self, config: AttentionConfig, hidden_size: int, ctx: StageContext):
        super().__init__(config, hidden_size, ctx)
        self._tp, shard = ctx.tp, self.shard
        first_kv = shard.kv[0]
        if ctx.tp.rank > 0:  # a KV head replicated on several ranks counts once, on the first of them
            first_kv = shard_heads(config.num_heads, config.num_kv_heads, ctx.tp.size, ctx.tp.rank - 1).kv[1]
        sizes = {"size": config.head_size, "eps": config.qk_norm_eps, "ctx": ctx}
        self.q_norm = ShardedRMSNorm(config.num_heads, shard.query, shard.query[0], **sizes)
        self.k_norm = ShardedRMSNorm(config.num_kv_heads, shard.kv, max(shard.kv[0], first_kv), **sizes)

    def _normalized(self, qkv_TI: torch.Tensor) -> torch.Tensor:
        config, shard = self.config, self.shard
        q_TI, k_TI, _ = qkv_TI.split(
            [config.head_size * n for n in (shard.num_query, shard.num_kv, shard.num_kv)], dim=1
        )
        squares = self._tp.all_reduce(torch.cat([self.q_norm.squares(q_TI), self.k_norm.squares(k_TI)], dim=1))
        q_squares, k_squares = squares.split([config.num_heads, config.num_kv_heads], dim=1)
        q_TI.copy_(self.q_norm(q_TI, q_squares.sum(dim=1)))
        k_TI.copy_(self.k_norm(k_TI, k_squares.sum(dim=1)))
        return qkv_TI


class ShardedRMSNorm(WeightedModule):
    """RMS norm over all heads, which are sharded over the ranks.

    Args:
        num_heads: heads of all ranks.
        heads: (begin, end) of this rank's heads.
        counted_from: first head whose squares this rank counts; earlier ones are replicas that another rank counts.
        size: head size.
    """

    def __init__(self, num_heads: int, heads: Range, counted_from: int, *, size: int, eps: float, ctx: StageContext):
        super().__init__()
        self._num_heads, self._heads, self._counted_from, self._size = num_heads, heads, counted_from, size
        self._eps = eps
        self.weight = empty_parameter((heads[1] - heads[0]) * size, dtype=ctx.dtype)

    def squares(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Sum of squares of each head that this rank counts, and zeros for the others, (T, heads of all ranks) float32."""
        squares_TH = x_TI.new_zeros(len(x_TI), self._num_heads, dtype=torch.float32)
        counted = x_TI.float().square().view(len(x_TI), -1, self._size)[:, self._counted_from - self._heads[0] :]
        squares_TH[:, self._counted_from : self._heads[1]] = counted.sum(dim=2)
        return squares_TH

    def forward(self, x_TI: torch.Tensor, sum_T: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's columns with the sum of squares over all ranks."""
        scale_T1 = torch.rsqrt(sum_T / (self._num_heads * self._size) + self._eps).unsqueeze(1)
        return self.weight * (x_TI.float() * scale_T1).to(x_TI.dtype)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        columns = (self._heads[0] * self._size, self._heads[1] * self._size)
        shape = (self._num_heads * self._size,)
        yield TensorSlice(name=f"{prefix}.weight", shape=shape, ranges=(columns,), destination=self.weight)
