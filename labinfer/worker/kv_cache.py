"""KVCacheManager: a rank's preallocated pools of KV blocks and states, in the layouts of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, compress
from operator import not_
from typing import Any

import torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import CacheMove, MoveKind
from labinfer.functions.layer_cache import TokenPool
from labinfer.models.layers.cache_spec import BlockPool, CacheSpec, TokenTensor
from labinfer.models.layers.rope import RopeConfig, RotaryTable
from labinfer.worker.host_copies import HostCopies

Pools = dict[str, torch.Tensor]
"""Pools of a layer by name; the first dimension is blocks or slots."""


class KVCacheManager:
    """Holds blocks of ``block_size`` tokens for every layer of this rank, and recurrent states of sequences.

    Args:
        specs: tensors that each layer keeps.
        sizes: numbers of blocks and slots. With window blocks, sliding-window layers have no other blocks.
        dtype: dtype of the cached keys and values; int8 adds scales.
        copies: copies between the device and the host; plain ``HostCopies`` by default.
        rotary_table: returns a layer's rotary table, by which entries that move to other positions are re-rotated.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        sizes: CacheSizes,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        rotary_table: Callable[[RopeConfig], RotaryTable],
        copies: HostCopies | None = None,
    ):
        self.block_size, self._device, self._copies = block_size, device, copies or HostCopies()
        self._specs, self._rotary_table = specs, rotary_table
        host = torch.device("cpu")
        self._in_windows = [sizes.num_window_blocks > 0 and spec.window > 0 for spec in specs]
        self.has_window_blocks = any(self._in_windows)
        counts = (sizes.num_blocks, sizes.num_window_blocks)
        host_counts = (sizes.num_host_blocks, sizes.num_host_window_blocks)
        self._forms = [spec.token_pools(dtype, block_size) for spec in specs]
        pairs = list(zip(self._forms, self._in_windows, strict=True))
        self._pools = pools = [_empty_pools(forms, counts[own], device) for forms, own in pairs]
        host_pools = [_empty_pools(forms, host_counts[own], host) for forms, own in pairs]
        states = [_state_pools(spec, sizes.num_states, device) for spec in specs]
        host_states = [_state_pools(spec, sizes.num_host_states, host) for spec in specs]
        others, host_others = (list(compress(each, map(not_, self._in_windows))) for each in (pools, host_pools))
        windows, host_windows = (list(compress(each, self._in_windows)) for each in (pools, host_pools))
        self._ends: dict[MoveKind, tuple[list[Pools], list[Pools]]] = {
            "copy": (others, others),
            "swap_out": (others, host_others),
            "swap_in": (host_others, others),
            "copy_window": (windows, windows),
            "swap_out_window": (windows, host_windows),
            "swap_in_window": (host_windows, windows),
            "copy_state": (states, states),
            "swap_out_state": (states, host_states),
            "swap_in_state": (host_states, states),
        }
        self.has_states = any(states)
        self.layers: list[Any] = [
            spec.view(**of_blocks, **of_slots) for spec, of_blocks, of_slots in zip(specs, pools, states, strict=True)
        ]
        """Views of the pools that each layer's ``forward`` receives."""

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def slots(self, block_table: Sequence[int], begin: int, end: int) -> list[int]:
        """Slots (block × block size + offset) of a sequence's tokens at positions ``begin`` to ``end`` (exclusive)."""
        size = self.block_size
        return [block_table[position // size] * size + position % size for position in range(begin, end)]

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Carry out a plan's moves of blocks and states, in order."""
        for move in moves:
            source, dest = torch.tensor(move.source), torch.tensor(move.dest)
            from_pools, to_pools = self._ends[move.kind]
            if from_pools is not to_pools or move.source != move.dest:
                both = zip(from_pools, to_pools, strict=True)
                if pairs := [(pools[name], others[name]) for pools, others in both for name in pools]:
                    self._copies.move(pairs, source, dest)
            if move.shift:
                self._shift(dest, move.shift, move.kind == "copy_window")

    def _shift(self, blocks: torch.Tensor, positions: int, in_windows: bool) -> None:
        """Re-rotate cached entries in ``blocks`` by ``positions``, in all layers.

        Args:
            in_windows: whether ``blocks`` are window blocks.
        """
        blocks = blocks.to(self._device)
        for spec, forms, pools, own in zip(self._specs, self._forms, self._pools, self._in_windows, strict=True):
            if own != in_windows:
                continue
            for name, tensor in spec.per_token.items():
                if tensor.rope is not None:
                    table = self._rotary_table(tensor.rope)
                    pool = TokenPool(pools[name], pools.get(f"{name}_scale"), forms[name].layout)
                    begin = tensor.rope_begin
                    if tensor.parts:  # parts that RoPE does not rotate stay bit-identical
                        pool, begin = _rotated_part(tensor, pool), 0
                    rotated = slice(begin, begin + tensor.rope.dim)
                    _rerotate(pool, rotated, blocks, table=table, positions=positions)


def _empty_pools(forms: Mapping[str, BlockPool], num_blocks: int, device: torch.device) -> Pools:
    return {name: form.empty(num_blocks, device) for name, form in forms.items()}


def _state_pools(spec: CacheSpec, num_slots: int, device: torch.device) -> Pools:
    return {
        name: torch.empty((num_slots, *tensor.shape), dtype=tensor.dtype, device=device)
        for name, tensor in spec.per_sequence.items()
    }


def _rotated_part(tensor: TokenTensor, pool: TokenPool) -> TokenPool:
    """View of a pool with only the part of its entries that RoPE rotates."""
    end = tensor.rope_begin + tensor.rope.dim
    index = [*accumulate(tensor.parts, initial=0)].index(tensor.rope_begin)
    return TokenPool(pool.data[..., tensor.rope_begin : end], None if pool.scale is None else pool.scale[..., index])


def _rerotate(pool: TokenPool, rotated: slice, blocks: torch.Tensor, *, table: RotaryTable, positions: int) -> None:
    """Re-rotate cached entries in ``blocks`` by ``positions``.

    Args:
        rotated: rotated indices of an entry's last dimension.
    """
    x = pool.load(blocks, torch.float32)
    part = x[..., rotated]
    x[..., rotated] = table.turn(part.reshape(len(x), -1, part.shape[-1]), positions).view(part.shape)
    size = len(x) // len(blocks)
    pool.store(x, (blocks.unsqueeze(1) * size + torch.arange(size, device=blocks.device)).flatten())
