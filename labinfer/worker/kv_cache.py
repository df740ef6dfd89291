"""The KV cache of one rank: a preallocated pool of blocks for each of its layers."""

from __future__ import annotations

import torch

from labinfer.functions.layer_cache import SCALE_DTYPE, LayerCache


class KVCacheManager:
    """Holds ``num_blocks`` blocks of ``block_size`` tokens for every layer of this rank.

    Args:
        num_kv_heads: this rank's, K.
        head_size: P.
        dtype: of the cache; int8 brings scales, see ``LayerCache``.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        # Not zeroed: what is never written is never read, and on a CPU a page is not resident before it is touched.
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads)
        pools = [torch.empty(*shape, head_size, dtype=dtype, device=device)]
        if dtype == torch.int8:
            pools.append(torch.empty(shape, dtype=SCALE_DTYPE, device=device))
        self.layers = [LayerCache(*(half for pool in pools for half in pool[layer])) for layer in range(num_layers)]


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank, over all its layers, keys and values, with their scales."""
    scale = SCALE_DTYPE.itemsize if dtype == torch.int8 else 0
    return num_layers * 2 * block_size * num_kv_heads * (head_size * dtype.itemsize + scale)


def blocks_that_fit(free_bytes: int, utilization: float, bytes_per_block: int, useful: int) -> int:
    """Blocks for a rank whose weights are loaded.

    Args:
        free_bytes: memory left for this rank.
        utilization: the fraction of it that may be used.
        useful: more than this many can never be filled.
    """
    return min(useful, int(free_bytes * utilization) // max(1, bytes_per_block))
