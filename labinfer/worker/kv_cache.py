"""The KV cache of one rank: a preallocated pool of blocks for each of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labinfer.functions.layer_cache import SCALE_DTYPE, LayerCache, read_keys, write_keys
from labinfer.layers.rope import RotaryTable
from labinfer.plan import CacheMove


class KVCacheManager:
    """Holds ``num_blocks`` blocks of ``block_size`` tokens for every layer of this rank.

    Args:
        num_kv_heads: this rank's, K.
        head_size: P.
        dtype: of the cache; int8 brings scales, see ``LayerCache``.
        num_host_blocks: blocks in host memory for sequences that are swapped out.
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
        num_host_blocks: int = 0,
    ):
        self.block_size = block_size
        self.layers = _make_pool((num_layers, 2, num_blocks, block_size, num_kv_heads), head_size, dtype, device)
        host_shape = (num_layers, 2, num_host_blocks, block_size, num_kv_heads)
        self._host_layers = _make_pool(host_shape, head_size, dtype, torch.device("cpu"))

    def move(self, moves: Sequence[CacheMove], rotary: RotaryTable) -> None:
        """Carry out what a plan says of whole blocks, in order.

        Args:
            rotary: turns keys that move to other positions.
        """
        for move in moves:
            source, dest = torch.tensor(move.source), torch.tensor(move.dest)
            if move.kind == "swap_out":
                _copy(self.layers, source, self._host_layers, dest)
            elif move.kind == "swap_in":
                _copy(self._host_layers, source, self.layers, dest)
            else:
                if move.source != move.dest:
                    _copy(self.layers, source, self.layers, dest)
                if move.shift:
                    self._shift_keys(dest, move.shift, rotary)

    def _shift_keys(self, blocks: torch.Tensor, shift: int, rotary: RotaryTable) -> None:
        blocks = blocks.to(self.layers[0].k.device)
        for layer in self.layers:
            write_keys(layer, blocks, rotary.turn(read_keys(layer, blocks, torch.float32), shift))


def _make_pool(shape: tuple[int, ...], head_size: int, dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """Pools of (layers, keys and values, blocks, block size, K, P), by layer."""
    # Not zeroed: what is never written is never read, and on a CPU a page is not resident before it is touched.
    pools = [torch.empty(*shape, head_size, dtype=dtype, device=device)]
    if dtype == torch.int8:
        pools.append(torch.empty(shape, dtype=SCALE_DTYPE, device=device))
    return [LayerCache(*(half for pool in pools for half in pool[layer])) for layer in range(shape[0])]


def _copy(
    source: list[LayerCache], source_blocks: torch.Tensor, dest: list[LayerCache], dest_blocks: torch.Tensor
) -> None:
    source_device, dest_device = source[0].k.device, dest[0].k.device
    source_blocks, dest_blocks = source_blocks.to(source_device), dest_blocks.to(dest_device)
    for taken_layer, given_layer in zip(source, dest, strict=True):
        for taken, given in zip(taken_layer.tensors(), given_layer.tensors(), strict=True):
            given[dest_blocks] = taken[source_blocks].to(dest_device)


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
