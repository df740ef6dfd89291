"""Slots for what some layers keep once for each sequence, and the snapshots among them. The states live on the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labinfer.engine.block_manager import BlockManager
from labinfer.engine.eviction import LRU, Eviction


class StateSlots:
    """A pool of slots, each with room for the state of one sequence.

    A running sequence holds one. A *snapshot* is a copy of it in another slot, taken where a block ends and known by that
    block's digest: a sequence that begins with the same tokens goes on from there, with the KV blocks before it. No sequence
    references a snapshot, so it can be evicted when a sequence needs a slot.

    Args:
        num_slots: slots on every rank.
        num_host_slots: slots in host memory, for sequences that are swapped out.
        interval: tokens from one snapshot of a sequence to the next, beside the one at the end of its prompt.
        eviction: makes the object that chooses which snapshot is evicted next.
    """

    def __init__(
        self, num_slots: int, num_host_slots: int = 0, interval: int = 1024, eviction: Callable[[], Eviction] = LRU
    ):
        self.slots = BlockManager(num_slots, 1, eviction=eviction)
        self.host = BlockManager(num_host_slots, 1, prefix_caching=False)
        self.interval = interval

    def deepest(self, digests: Sequence[bytes]) -> int:
        """Count a sequence's first blocks up to its deepest snapshot, given the blocks' digests; 0 without any."""
        for count in range(len(digests), 0, -1):
            if self.slots.find(digests[count - 1 : count]):
                return count
        return 0

    def take(self, digest: bytes | None) -> tuple[int, int | None] | None:
        """A slot for a sequence, and the snapshot of ``digest`` to copy into it, if one is wanted; None without room.

        Where no other slot is free, the sequence has that of the snapshot itself.
        """
        snapshot = self.slots.find([digest]) if digest is not None else []
        if snapshot and self.slots.num_free == 1:
            self.slots.acquire(snapshot, 0)
            self.slots.unregister(snapshot[0])
            return snapshot[0], None
        taken = self.slots.acquire(snapshot, 1)
        if taken is None:
            return None
        self.slots.free(snapshot)
        return taken[-1], snapshot[0] if snapshot else None

    def snapshot(self, digest: bytes) -> int | None:
        """A slot for a snapshot of this digest; None where there is one already, or no room but that of sequences."""
        if self.slots.find([digest]):
            return None
        slots = self.slots.allocate(1)
        if slots is None:
            return None
        self.slots.register(slots[0], digest)
        self.slots.free(slots)
        return slots[0]
