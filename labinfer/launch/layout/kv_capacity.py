"""``KVCapacity``: number of KV blocks and state slots, equal on all ranks because each rank caches its layers of every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.communicator import name_ranks
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.machine import free_memory
from labinfer.comm.spmd.topology import Place
from labinfer.engine.cache_capacity import (
    BlockCounts,
    BlockRoom,
    CacheRoom,
    WindowNeeds,
    count_blocks,
    pool_rooms,
    states_that_fit,
)
from labinfer.launch.draft_model import LoadedDraftModel
from labinfer.launch.layout.layout import GIB, Layout
from labinfer.weights.weight_cache import WeightCache

logger = logging.getLogger(__name__)

DEFAULT_SWAP_SPACE = 4
"""Default swap space in GiB, as in vLLM."""
DEFAULT_SWAP_FRACTION = 0.25
"""Largest fraction of the free host memory for the default swap space."""


@dataclass(frozen=True, kw_only=True)
class KVCapacity:
    """Capacity of the KV cache and of the recurrent states, agreed on by all ranks."""

    sizes: CacheSizes
    """Cache sizes: the minimum over all ranks, at most ``planned_blocks`` if given. ``max_model_len`` is at most the tokens that fit."""
    blocks_of_rank: tuple[int, ...]
    """Blocks that fit on each placed rank."""
    gain: float = 1.0
    """Ratio of the tokens that fit to the tokens that would fit if sliding-window layers kept all tokens."""
    captured_bytes: int = 0
    """Bytes of this rank reserved for captured steps."""
    planned_blocks: int = 0
    """KV blocks of the plan; see ``EngineOptions``."""

    def describe_windows(self, layout: Layout) -> str:
        """Text about the block pool of sliding-window layers; empty if they have none."""
        sizes = self.sizes
        if not sizes.window:
            return ""
        return describe_windows(sizes.window, sizes.num_window_blocks, layout.tokens_in(sizes.num_blocks), self.gain)

    def describe_shortfall(self, layout: Layout) -> str:
        """Text that names the stages with less memory than the plan assumed; empty if the planned blocks fit."""
        num_blocks, places = self.sizes.num_blocks, layout.topology.places
        if num_blocks >= self.planned_blocks:
            return ""
        stages = sorted(
            {p.stage for p, count in zip(places, self.blocks_of_rank, strict=True) if count < self.planned_blocks}
        )
        return (
            f"{layout.tokens_in(num_blocks)} tokens fit, fewer than the {layout.tokens_in(self.planned_blocks)} of "
            f"the plan: stage {', '.join(map(str, stages))} has less free memory or larger weights than when it "
            "was measured; make a new plan"
        )

    def describe_limit(self, places: list[Place]) -> str:
        """Text that names the stages that limit the number of blocks; empty if equally many fit on every stage."""
        num_blocks, least, most = self.sizes.num_blocks, min(self.blocks_of_rank), max(self.blocks_of_rank)
        if num_blocks == self.planned_blocks:
            return f"number of blocks from the plan; {least} would fit" if least > num_blocks else ""
        if most == num_blocks:
            return ""
        stages = sorted({p.stage for p, count in zip(places, self.blocks_of_rank, strict=True) if count == num_blocks})
        roomiest = places[self.blocks_of_rank.index(most)]
        percent = 100 * (most - num_blocks) / num_blocks
        return (
            f"limited by stage {', '.join(map(str, stages))}; stage {roomiest.stage} could hold {most} "
            f"({percent:.0f} % more); move layers there with --layers"
        )


def describe_windows(window: int, num_window_blocks: int, num_tokens: int, gain: float) -> str:
    """Text about the block pool of sliding-window layers.

    Args:
        num_tokens: tokens that fit into the cache.
        gain: ratio of ``num_tokens`` to the tokens that would fit if all layers kept all tokens.
    """
    text = f"sliding-window layers keep the last {window} tokens, in {num_window_blocks} separate blocks"
    if gain > 1:
        text += f"; {num_tokens} tokens fit, {gain:.2g} times as many as with full caches"
    return text


@dataclass(frozen=True, kw_only=True)
class RankRoom(CacheRoom):
    """Memory that a rank has for its cache on its device and host. Sizes are in bytes."""

    free: int
    """Free bytes; KV blocks and states may take ``num_bytes`` of them."""
    window: int
    """Largest sliding window of the rank's layers in tokens; 0 if none has one."""
    host: int
    """Bytes for KV blocks in host memory."""
    num_host_states: int
    draft_block_bytes: int
    """Bytes of ``block_bytes`` that belong to a draft model's block. Draft blocks are not swapped to host memory."""

    @property
    def host_block_bytes(self) -> int:
        """Bytes in host memory of a block of all full-attention layers."""
        return self.block_bytes - self.draft_block_bytes

    def for_host_blocks(self) -> BlockRoom:
        return BlockRoom(
            num_bytes=self.host, block_bytes=self.host_block_bytes, window_block_bytes=self.window_block_bytes
        )


def agree_on_blocks(
    group: RankGroup,
    options: EngineOptions,
    layout: Layout,
    place: Place,
    *,
    draft_model: LoadedDraftModel | None,
    captured_bytes: int,
) -> KVCapacity:
    """Agree on the number of KV blocks of all ranks, once weights are loaded; rank 0 logs what limits it. Collective.

    Args:
        draft_model: draft model that this rank holds in addition to its stage; None if it holds none.
        captured_bytes: bytes reserved on this rank for captured steps.

    Raises:
        CollectiveError: a rank has too little memory for the required or requested blocks.
    """
    cache, meta = options.cache, layout.meta(place)
    useful = layout.useful_blocks(options.scheduler.max_num_seqs)
    per_block, per_state = layout.block_bytes(place), meta.bytes_per_sequence
    device = torch_device(layout.devices[group.rank])
    weights = WeightCache.from_home(cache.weight_cache_size)
    with group.raise_on_all_ranks():
        free = free_memory(device, cache.num_kv_blocks) // layout.sharing_device(group.rank, group.everyone)
        host = swap_bytes(group, options, layout, per_block)
        num_host_states = states_that_fit(host, per_state, options.scheduler.max_num_seqs, each=1)
        num_host = min(useful, (host - num_host_states * per_state) // max(1, per_block))
    if device.type == "cpu" and weights is not None:  # the system counts memory-mapped files as available memory
        free -= weights.mapped_bytes()
    if device.type == "cpu":  # both pools use the same memory
        free -= num_host * per_block + num_host_states * per_state
    free -= captured_bytes + (draft_model.state_bytes if draft_model is not None else 0)
    per_draft_block = draft_model.block_bytes if draft_model is not None else 0
    mine = RankRoom(
        **asdict(layout.cache_room(place, int(free * cache.memory_utilization), per_draft_block)),
        free=free,
        window=meta.window,
        host=host - num_host_states * per_state,
        num_host_states=num_host_states,
        draft_block_bytes=per_draft_block,
    )
    gathered = group.comm.all_gather(torch.tensor(astuple(mine)))
    of_rank = [RankRoom(**dict(zip(asdict(mine), numbers.tolist(), strict=True))) for numbers in gathered]
    memories = [layout.memory(rank, group.everyone) for rank in group.ranks]
    max_num_seqs = options.scheduler.max_num_seqs
    rooms = pool_rooms(of_rank, memories)
    fitting, needs = count_fitting_blocks(options, layout, rooms, max(each.window for each in of_rank))
    blocks = fitting.capped(options.planned_blocks)
    num_host, num_host_window_blocks = _host_blocks(of_rank, blocks, useful)
    largest = max(each.state_bytes for each in of_rank)
    num_states = num_host_states = 0
    if largest:
        num_states = min(room.num_states(max_num_seqs) for room in rooms)
        num_host_states = min(each.num_host_states for each in of_rank)
    free_of_rank = [
        sum(each.free for each, other in zip(of_rank, memories, strict=True) if other == name) for name in memories
    ]
    own, memory = rooms[group.comm.rank], memories[group.comm.rank]
    needed = own.used_bytes(blocks)
    left = free_of_rank[group.comm.rank] - own.num_states(max_num_seqs) * own.state_bytes
    with group.raise_on_all_ranks():
        if fitting.num_blocks < layout.least_blocks:
            least = fitting.of_rank.index(fitting.num_blocks)
            raise UserError(
                f"{layout.topology.place(group.ranks[least])} has too little memory for a KV cache "
                f"({max(0, free_of_rank[least]) >> 20} MiB free, shared by all ranks on this memory); raise "
                "--memory-utilization or use more ranks"
            )
        if largest and num_states < 1:
            least = group.ranks[[room.num_states(max_num_seqs) for room in rooms].index(num_states)]
            raise UserError(
                f"{layout.topology.place(least)} has too little memory for the recurrent state of one sequence "
                f"({largest} bytes at most on a rank); raise --memory-utilization or use more ranks"
            )
        if cache.num_kv_blocks and needed > left:
            sharing = [rank for rank, name in zip(group.ranks, memories, strict=True) if name == memory]
            raise UserError(
                f"--num-kv-blocks {cache.num_kv_blocks} needs {needed >> 20} MiB on {name_ranks(sharing)}, but "
                f"{max(0, left) >> 20} MiB are free{' in total' * (len(sharing) > 1)}"
            )
    sizes = CacheSizes(
        num_blocks=blocks.num_blocks,
        num_host_blocks=num_host,
        window=needs.window if blocks.num_window_blocks else 0,
        num_window_blocks=blocks.num_window_blocks,
        num_host_window_blocks=num_host_window_blocks,
        num_states=num_states,
        num_host_states=num_host_states,
        max_model_len=min(layout.max_model_len, layout.tokens_in(blocks.num_blocks)),
    )
    capacity = KVCapacity(
        sizes=sizes,
        blocks_of_rank=fitting.of_rank,
        gain=blocks.gain,
        captured_bytes=captured_bytes,
        planned_blocks=options.planned_blocks,
    )
    if group.rank == 0:
        _log_capacity(capacity, layout)
    return capacity


def count_fitting_blocks(
    options: EngineOptions, layout: Layout, rooms: Sequence[CacheRoom], window: int
) -> tuple[BlockCounts, WindowNeeds | None]:
    """KV block counts for all ranks, not limited by a plan, and the blocks that sliding-window layers need (None if they keep all tokens).

    Args:
        rooms: memory of each placed rank, pooled with the other ranks that use the same memory.
        window: largest sliding window of any layer, 0 if none has one.
    """
    max_num_seqs, needs = options.scheduler.max_num_seqs, layout.window_needs(options, window)
    block_rooms = [room.for_blocks(max_num_seqs) for room in rooms]
    useful = layout.useful_blocks(max_num_seqs)
    return count_blocks(block_rooms, useful, needs, fixed=options.cache.num_kv_blocks), needs


def _log_capacity(capacity: KVCapacity, layout: Layout) -> None:
    """Log a capacity below the plan's blocks or below the model's context length."""
    if shortfall := capacity.describe_shortfall(layout):
        logger.warning("KV cache: %s", shortfall)
    if not layout.config.is_causal:
        logger.info(
            "the model is not causal and runs a prompt in one step, which limits the context length to %d tokens; "
            "raise it with --max-num-batched-tokens",
            layout.max_model_len,
        )
    if (fits := capacity.sizes.max_model_len) < layout.max_model_len:
        logger.info(
            "context length reduced from %d to %d tokens, the capacity of the KV cache",
            layout.max_model_len,
            fits,
        )


def _host_blocks(of_rank: Sequence[RankRoom], blocks: BlockCounts, useful: int) -> tuple[int, int]:
    """Blocks in host memory, of full-attention and of sliding-window layers, in the ratio of the device's blocks."""
    if not blocks.num_window_blocks:
        return min(each.for_host_blocks().whole_blocks(useful) for each in of_rank), 0
    share = blocks.num_window_blocks / blocks.num_blocks
    count = min(
        useful,
        *(int(each.host / max(1, each.host_block_bytes + share * each.window_block_bytes)) for each in of_rank),
    )
    return count, int(share * count)


def swap_bytes(group: RankGroup, options: EngineOptions, layout: Layout, per_block: int) -> int:
    """Bytes of host memory of this rank for swapped-out sequences.

    Args:
        per_block: bytes of a block of all layers; 0 if not known yet.

    Raises:
        UserError: ``--swap-space`` exceeds the free memory, or is less than a block.
    """
    mode, gib = options.scheduler.preemption_mode, options.cache.swap_space
    free = free_memory(torch.device("cpu")) // group.num_sharing_memory
    if gib:
        if gib * GIB > free:
            raise UserError(
                f"--swap-space {gib:g} GiB exceeds the {free / GIB:.1f} GiB of free memory per rank; give less"
            )
        if gib * GIB < per_block:
            raise UserError(f"--swap-space {gib:g} GiB is less than one KV block of {per_block} bytes; raise it")
        return int(gib * GIB)
    if mode == "swap" or (mode == "auto" and any(device.type != "cpu" for device in layout.devices.values())):
        return min(DEFAULT_SWAP_SPACE * GIB, int(free * DEFAULT_SWAP_FRACTION))
    return 0
