"""``LayerCache``: the paged keys and values of one layer, their dtypes, and the memory layouts of a block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from labinfer.native.memory import use_huge_pages

INT8_STEPS = 127
"""Largest quantized value of an int8 KV cache; -128 is unused, so that the range is symmetric."""
SCALE_DTYPE = torch.float32
TILE = 16
"""Tokens per tile of the tiled layouts."""


class PoolLayout(Enum):
    """Memory layout of the entries in a block of a pool. A block has an equal size in bytes in every layout.

    In the tiled layouts, a KV head's part of a block is contiguous and in the order in which the matrix products read it: pairs of
    a key's dimensions for the scores, pairs of tokens for the weighted values. See ``docs/decisions/0038-kv-blocks-in-tiles.md``.
    """

    ROWS = "rows"
    """Row-major by token: (block size, …) for any entry."""
    KEY_TILES = "key tiles"
    """Tiled layout of keys: (K, block size / TILE, P / 2, TILE, 2) for entries (K, P)."""
    VALUE_TILES = "value tiles"
    """Tiled layout of values: (K, block size / 2, P, 2) for entries (K, P); a tile is TILE / 2 pairs of tokens."""
    HEADS_FIRST = "heads first"
    """Layout of a tiled pool's scales: (K, block size) for entries (K)."""

    def block_shape(self, block_size: int, entry: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one block."""
        if self == PoolLayout.KEY_TILES:
            return entry[0], block_size // TILE, entry[1] // 2, TILE, 2
        if self == PoolLayout.VALUE_TILES:
            return entry[0], block_size // 2, entry[1], 2
        return (entry[0], block_size) if self == PoolLayout.HEADS_FIRST else (block_size, *entry)

    def by_token(self, pool: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A view of ``pool`` with the dimensions that index a token first (block, then position in the block), and the sizes of the
        position dimensions. In ``KEY_TILES`` an entry of the view is (K, P / 2, 2)."""
        if self == PoolLayout.KEY_TILES:
            return pool.permute(0, 2, 4, 1, 3, 5), (pool.shape[2], TILE)
        if self == PoolLayout.VALUE_TILES:
            return pool.permute(0, 2, 4, 1, 3), (pool.shape[2], 2)
        view = pool.transpose(1, 2) if self == PoolLayout.HEADS_FIRST else pool
        return view, (view.shape[1],)

    @property
    def scale_layout(self) -> PoolLayout:
        """Layout of the scales of a pool in this layout."""
        return PoolLayout.ROWS if self == PoolLayout.ROWS else PoolLayout.HEADS_FIRST


def empty_pool(num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised blocks; on CPUs in huge pages if available."""
    pool = torch.empty(num_blocks, *block_shape, dtype=dtype, device=device)
    if device.type == "cpu":
        use_huge_pages(pool.data_ptr(), pool.nbytes)
    return pool


def can_tile(block_size: int, head_size: int) -> bool:
    """Whether ``block_size`` and ``head_size`` are multiples of ``TILE``."""
    return block_size % TILE == 0 and head_size % TILE == 0


@dataclass(frozen=True)
class TokenPool:
    """Cached entries of tokens, in any layout. An int8 pool has one scale for each row of an entry."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    layout: PoolLayout = PoolLayout.ROWS

    def load(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Entries of ``blocks`` in order: (S, …) in ``dtype``, S = blocks × block size."""
        entries = _gather(self.data, self.layout, blocks)
        if self.layout == PoolLayout.KEY_TILES:
            entries = entries.flatten(-2)
        if self.scale is not None:
            entries = entries * _gather(self.scale, self.layout.scale_layout, blocks).unsqueeze(-1)
        return entries.to(dtype)

    def store(self, x: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write entries (T, …) of any float dtype to ``slots_T``: block × block size + offset."""
        if self.scale is not None:
            x, steps = quantize(x)
            _scatter(steps, self.scale, self.layout.scale_layout, slots_T)
        if self.layout == PoolLayout.KEY_TILES:
            x = x.unflatten(-1, (-1, 2))
        _scatter(x, self.data, self.layout, slots_T)


def _gather(pool: torch.Tensor, layout: PoolLayout, blocks: torch.Tensor) -> torch.Tensor:
    view, sizes = layout.by_token(pool[blocks])
    return view.flatten(0, len(sizes))


def _scatter(x: torch.Tensor, pool: torch.Tensor, layout: PoolLayout, slots_T: torch.Tensor) -> None:
    view, sizes = layout.by_token(pool)
    places = []
    for size in reversed(sizes):  # torch.unravel_index would synchronize with an accelerator
        places.append(slots_T % size)
        slots_T = slots_T // size
    view[(slots_T, *reversed(places))] = x.to(pool.dtype)


@dataclass(frozen=True)
class LayerCache:
    """The KV pool of one layer. Dimension 0 of every tensor indexes blocks in every layout, so a block is moved by copying its slice.

    An int8 pool holds ``round(x / scale)`` with one scale per token and KV head, separately for keys and values. A token is thus
    written independently of its neighbours, and all ranks that hold a head store equal values.
    """

    k: torch.Tensor
    """Keys, (blocks, block size, KV heads, head size), or in ``KEY_TILES`` if the tensor has 6 dimensions."""
    v: torch.Tensor
    """Values, (blocks, block size, KV heads, head size), or in ``VALUE_TILES``."""
    k_scale: torch.Tensor | None = None
    """Scales of the keys, (blocks, block size, KV heads) in ``SCALE_DTYPE``, or (blocks, KV heads, block size) if
    tiled; None unless int8."""
    v_scale: torch.Tensor | None = None
    """Scales of the values, with the shape and dtype of ``k_scale``."""

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        block_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
        tiled: bool = False,
    ) -> LayerCache:
        """A cache of zeros for ``heads`` (K, P); ``tiled`` has no effect unless ``can_tile``."""
        tiled = tiled and can_tile(block_size, heads[1])
        layouts = (PoolLayout.KEY_TILES, PoolLayout.VALUE_TILES) if tiled else (PoolLayout.ROWS, PoolLayout.ROWS)

        def pool(layout: PoolLayout, entry: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_blocks, *layout.block_shape(block_size, entry), dtype=dtype, device=device)

        pools = [pool(layout, heads, dtype) for layout in layouts]
        if dtype == torch.int8:
            pools += [pool(layout.scale_layout, heads[:1], SCALE_DTYPE) for layout in layouts]
        return cls(*pools)

    @property
    def is_tiled(self) -> bool:
        return self.k.dim() == 6

    @property
    def block_size(self) -> int:
        return self.k.shape[2] * TILE if self.is_tiled else self.k.shape[1]

    @property
    def keys(self) -> TokenPool:
        return TokenPool(self.k, self.k_scale, PoolLayout.KEY_TILES if self.is_tiled else PoolLayout.ROWS)

    @property
    def values(self) -> TokenPool:
        return TokenPool(self.v, self.v_scale, PoolLayout.VALUE_TILES if self.is_tiled else PoolLayout.ROWS)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the cache; block i is slice i of each."""
        return tuple(tensor for tensor in (self.k, self.v, self.k_scale, self.v_scale) if tensor is not None)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization within ±127, with one scale per row: (…, P) → (…, P) int8, (…) ``SCALE_DTYPE``.

    The error is at most half a scale. A NaN or infinity in a row makes its scale, and so the whole row, not finite.
    """
    wide = x.to(SCALE_DTYPE)
    # The lower bound avoids a division by zero and keeps quotients of denormals within ±127.
    scale = (wide.abs().amax(-1) / INT8_STEPS).clamp_min(torch.finfo(SCALE_DTYPE).tiny)
    return (wide / scale.unsqueeze(-1)).round().to(torch.int8), scale
