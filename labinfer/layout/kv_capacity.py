"""``KVCapacity``: KV blocks and state slots, one number for all ranks, as each holds its layers of every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.cache_capacity import blocks_that_fit, states_that_fit
from labinfer.config import EngineOptions
from labinfer.errors import UserError
from labinfer.group.rank_group import RankGroup
from labinfer.layout.layout import GIB, Layout
from labinfer.spmd.machine import free_memory
from labinfer.spmd.topology import Place
from labinfer.weights.weight_cache import WeightCache

DEFAULT_SWAP_SPACE = 4
"""GiB, as vLLM has it."""
DEFAULT_SWAP_FRACTION = 0.25
"""Part of the free host memory that swapping takes, where that is less."""


@dataclass(frozen=True, kw_only=True)
class KVCapacity:
    """Room for keys, values and states, as all ranks have agreed on it."""

    num_blocks: int
    """The least of what each has room for."""
    num_host_blocks: int
    """In host memory, for sequences that are swapped out."""
    max_model_len: int
    """The context that fits."""
    blocks_of_rank: tuple[int, ...]
    """Blocks that each rank with a place has room for."""
    num_states: int = 0
    """Slots for states of sequences; 0 where no layer keeps any."""
    num_host_states: int = 0
    """The same in host memory."""

    def describe_limit(self, places: list[Place]) -> str:
        """A text that names the stages with the least room; empty where all have the same."""
        most = max(self.blocks_of_rank)
        if most == self.num_blocks:
            return ""
        stages = sorted(
            {p.stage for p, count in zip(places, self.blocks_of_rank, strict=True) if count == self.num_blocks}
        )
        roomiest = places[self.blocks_of_rank.index(most)]
        percent = 100 * (most - self.num_blocks) / self.num_blocks
        return (
            f"limited by stage {', '.join(map(str, stages))}; stage {roomiest.stage} has room for {most} ({percent:.0f} % "
            "more); --layers can move layers there"
        )


@dataclass(frozen=True)
class DraftRoom:
    """Bytes that the cache of a draft model takes on a rank; none where it holds none."""

    block: int = 0
    """Bytes of a block, beside each of the model's."""
    states: int = 0
    """Bytes of all states."""


def agree_on_blocks(
    group: RankGroup, options: EngineOptions, layout: Layout, place: Place, draft: DraftRoom
) -> KVCapacity:
    """Count the blocks of every rank, once its weights are loaded; collective.

    Args:
        draft: bytes that a draft model's cache takes on this rank.

    Raises:
        AgreedError: a rank has no room for what is needed or asked for.
    """
    size, cache = options.cache.block_size, options.cache
    useful = layout.useful_blocks(options.scheduler.max_num_seqs, size)
    per_block, per_state = layout.block_bytes(place, size), layout.meta(place).bytes_per_sequence
    device = layout.devices[group.rank]
    free = free_memory(device) // layout.sharing_device(group.rank, group.everyone)
    weights = WeightCache.from_home(cache.weight_cache_size)
    if device.type == "cpu" and weights is not None:  # the system calls memory of mapped files available
        free -= weights.mapped_bytes()
    with group.together():
        host = _swap_bytes(group, options, layout, per_block)
        num_host_states = states_that_fit(host, per_state, options.scheduler.max_num_seqs, each=1)
        num_host = min(useful, (host - num_host_states * per_state) // max(1, per_block))
    if device.type == "cpu":  # both pools are in the same memory
        free -= num_host * per_block + num_host_states * per_state
    free -= draft.states
    room = int(free * cache.memory_utilization)
    num_states = states_that_fit(room, per_state, options.scheduler.max_num_seqs)
    state_bytes = num_states * per_state
    room -= state_bytes
    per_block += draft.block
    num_blocks = cache.num_kv_blocks or blocks_that_fit(room, per_block, useful)
    mine = [num_blocks, num_host, num_states, num_host_states, -per_state]
    of_rank = [counts.tolist() for counts in group.comm.all_gather(torch.tensor(mine))]
    num_blocks, num_host, num_states, num_host_states, largest = (min(column) for column in zip(*of_rank, strict=True))
    if not largest:  # no rank has a layer that keeps states
        num_states = num_host_states = 0
    with group.together():
        if num_blocks * size < 2:
            least = group.ranks[[counts[0] for counts in of_rank].index(num_blocks)]
            raise UserError(
                f"{layout.topology.place(least)} has no room for KV cache ({free >> 20} MiB free for it here); raise "
                "--memory-utilization or use more ranks"
            )
        if largest and num_states < 1:
            least = group.ranks[[counts[2] for counts in of_rank].index(num_states)]
            raise UserError(
                f"{layout.topology.place(least)} has no room for the state of a sequence ({-largest} bytes at most on a rank); "
                "raise --memory-utilization or use more ranks"
            )
        if cache.num_kv_blocks and cache.num_kv_blocks * per_block > free - state_bytes:
            raise UserError(
                f"--num-kv-blocks {cache.num_kv_blocks} needs {cache.num_kv_blocks * per_block >> 20} MiB on {place}, but "
                f"{free - state_bytes >> 20} MiB are free"
            )
    fits = min(layout.max_model_len, num_blocks * size)
    return KVCapacity(
        num_blocks=num_blocks,
        num_host_blocks=num_host,
        max_model_len=fits,
        blocks_of_rank=tuple(counts[0] for counts in of_rank),
        num_states=num_states,
        num_host_states=num_host_states,
    )


def _swap_bytes(group: RankGroup, options: EngineOptions, layout: Layout, per_block: int) -> int:
    """Host memory of this rank for sequences that are swapped out.

    Raises:
        UserError: more is asked for than there is, or less than a block.
    """
    mode, gib = options.scheduler.preemption_mode, options.cache.swap_space
    on_node = sum(info.node == group.everyone[group.rank].node for info in group.everyone)
    free = free_memory(torch.device("cpu")) // on_node
    if gib:
        if gib * GIB > free:
            raise UserError(f"--swap-space {gib:g} GiB is more than the {free / GIB:.1f} GiB that are free for a rank")
        if gib * GIB < per_block:
            raise UserError(f"--swap-space {gib:g} GiB has no room for a KV block of {per_block} bytes; raise it")
        return int(gib * GIB)
    if mode == "swap" or (mode == "auto" and any(device.type != "cpu" for device in layout.devices.values())):
        return min(DEFAULT_SWAP_SPACE * GIB, int(free * DEFAULT_SWAP_FRACTION))
    return 0
