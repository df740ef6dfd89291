"""``CacheSpec``: what a layer keeps between steps, as the layer itself says it."""

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
    """A tensor of which every token leaves one entry in the layer's KV blocks."""

    shape: tuple[int, ...]
    """Shape of a token's entry, such as (K, P)."""
    dtype: torch.dtype | None = None
    """None for the dtype of the KV cache. In int8 every row of the last dimension then has a scale of its own."""
    rope: RopeConfig | None = None
    """The rotary table that gave the entry its position; None where it has none. A context shift turns such entries."""
    rope_begin: int = 0
    """First rotated index of the last dimension; the rotated part is as long as the table is wide."""
    can_turn: bool = True
    """Whether rotating the entry further gives that of another position; not where it was scaled after it was rotated."""
    parts: tuple[int, ...] = ()
    """Sizes of the parts of the last dimension that have a scale each in int8; empty for one scale. The rotated part is one."""
    is_replicated: bool = False
    """Whether every tensor-parallel rank keeps all of it, so that more ranks make it no smaller."""
    layout: PoolLayout = PoolLayout.ROWS
    """The layout of its pool, where block size and dtype allow it."""

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of a token's entry in int8."""
        return self.shape[:-1] + ((len(self.parts),) if self.parts else ())


@dataclass(frozen=True, kw_only=True)
class BlockPool:
    """A pool of blocks as it is allocated."""

    block_shape: tuple[int, ...]
    dtype: torch.dtype
    layout: PoolLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    def empty(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        # Not zeroed: what is never written is never read, and on a CPU a page, large or small, is not resident before it is touched.
        return empty_pool(num_blocks, self.block_shape, self.dtype, device)


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """A tensor that a layer keeps once for each sequence, of a size that does not grow with the sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Tensors that one layer of one rank keeps between steps."""

    view: Callable[..., Any]
    """Called with every pool by its name; makes of them what the layer's ``forward`` receives as its cache. Pools of token
    tensors are (blocks, block size, …), or as their layout has it, int8's scales come as ``<name>_scale``; pools of state tensors are (slots, …)."""
    per_token: Mapping[str, TokenTensor] = field(default_factory=dict)
    per_sequence: Mapping[str, StateTensor] = field(default_factory=dict)
    window: int = 0
    """Tokens that a token sees of those in KV blocks, itself included; 0 for all."""

    def token_pools(self, kv_dtype: torch.dtype, block_size: int) -> dict[str, BlockPool]:
        """Every pool in KV blocks by its name, scales included. All are in rows unless all can be in their layouts."""
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
        """Bytes that a token takes in this layer's KV blocks, scales included."""
        return sum(pool.block_bytes for pool in self.token_pools(kv_dtype, 1).values())  # blocks of one token

    @property
    def is_replicated(self) -> bool:
        """Whether every tensor-parallel rank keeps all that a token leaves."""
        return bool(self.per_token) and all(tensor.is_replicated for tensor in self.per_token.values())

    @property
    def can_shift(self) -> bool:
        """Whether tokens can be taken out of the context, those after them moving down."""
        tensors = self.per_token.values()
        is_fixed = all(tensor.rope is None or not tensor.rope.dynamic_from for tensor in tensors)
        return not self.per_sequence and is_fixed and all(tensor.can_turn for tensor in tensors)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of this layer's state of one sequence."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.per_sequence.values())
