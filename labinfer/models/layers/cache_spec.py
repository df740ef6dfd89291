"""``CacheSpec``: the tensors that a layer keeps between steps, declared by the layer itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from labinfer.functions.layer_cache import SCALE_DTYPE, PoolLayout, can_tile, empty_pool
from labinfer.models.layers.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class TokenTensor:
    """A cached tensor with one entry per token, stored in the layer's KV blocks."""

    shape: tuple[int, ...]
    """Shape of a token's entry, such as (K, P)."""
    dtype: torch.dtype | None = None
    """Dtype of the stored entries; None for the dtype of the KV cache. In int8, every row of the last dimension has a scale."""
    rope: RopeConfig | None = None
    """Rotary config of the entry; None if it is not rotated. A context shift re-rotates such entries."""
    rope_begin: int = 0
    """First rotated index of the last dimension; ``rope.dim`` indices are rotated."""
    can_turn: bool = True
    """Whether re-rotating the entry gives the entry of another position, as a context shift needs; False if it was scaled after rotation."""
    parts: tuple[int, ...] = ()
    """Sizes of the parts of the last dimension that have separate scales in int8; empty for one scale. The rotated part is one of them."""
    is_replicated: bool = False
    """Whether every tensor-parallel rank stores the whole entry, so that more ranks do not reduce the memory."""
    layout: PoolLayout = PoolLayout.ROWS
    """Layout of the pool; ``ROWS`` is used instead if the block size or the last dimension does not allow it."""

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of a token's entry in int8."""
        return self.shape[:-1] + ((len(self.parts),) if self.parts else ())


@dataclass(frozen=True, kw_only=True)
class BlockPool:
    """Shape, dtype and layout of an allocated pool of blocks."""

    block_shape: tuple[int, ...]
    dtype: torch.dtype
    layout: PoolLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    def empty(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        # Not zeroed: unwritten slots are never read, and on CPUs a page is not resident before it is touched.
        return empty_pool(num_blocks, self.block_shape, self.dtype, device)


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """A tensor of fixed size that a layer keeps for each sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Tensors that one layer of one rank keeps between steps."""

    view: Callable[..., Any]
    """Builds the cache argument of the layer's ``forward``; called with every pool by its name. Pools of token tensors are (blocks, block
    size, …), or in their own layout; scales of int8 pools are named ``<name>_scale``. Pools of state tensors are (slots, …)."""
    per_token: Mapping[str, TokenTensor] = field(default_factory=dict)
    per_sequence: Mapping[str, StateTensor] = field(default_factory=dict)
    window: int = 0
    """Sliding-window size in tokens, the token's own included; 0 for full attention."""

    def token_pools(self, kv_dtype: torch.dtype, block_size: int) -> dict[str, BlockPool]:
        """Pools in KV blocks by name, scales included. All pools use ``ROWS`` unless all can use their own layouts."""
        tiles = [tensor for tensor in self.per_token.values() if tensor.layout != PoolLayout.ROWS]
        fits = all(can_tile(block_size, tensor.shape[-1]) for tensor in tiles)

        def pool(layout: PoolLayout, entry: tuple[int, ...], dtype: torch.dtype) -> BlockPool:
            return BlockPool(block_shape=layout.block_shape(block_size, entry), dtype=dtype, layout=layout)

        pools: dict[str, BlockPool] = {}
        for name, tensor in self.per_token.items():
            layout = tensor.layout if fits else PoolLayout.ROWS
            pools[name] = pool(layout, tensor.shape, tensor.dtype or kv_dtype)
            if tensor.dtype is None and kv_dtype == torch.int8:
                pools[f"{name}_scale"] = pool(layout.scale_layout, tensor.scale_shape, SCALE_DTYPE)
        return pools

    def bytes_per_token(self, kv_dtype: torch.dtype) -> int:
        """Bytes of a token in this layer's KV blocks, scales included."""
        return sum(pool.block_bytes for pool in self.token_pools(kv_dtype, 1).values())  # blocks of one token

    @property
    def is_replicated(self) -> bool:
        """Whether every tensor-parallel rank stores all of a token's entries."""
        return bool(self.per_token) and all(tensor.is_replicated for tensor in self.per_token.values())

    @property
    def can_shift(self) -> bool:
        """Whether the layer supports context shift: removing tokens and moving later ones to lower positions."""
        tensors = self.per_token.values()
        is_fixed = all(tensor.rope is None or not tensor.rope.dynamic_from for tensor in tensors)
        return not self.per_sequence and is_fixed and all(tensor.can_turn for tensor in tensors)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one sequence's state in this layer."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.per_sequence.values())
