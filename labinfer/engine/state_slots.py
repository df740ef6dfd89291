"""StateSlots: slots for the recurrent states of sequences, and cached snapshots of states. Workers hold the contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labinfer.engine.block_manager import BlockManager
from labinfer.engine.eviction import LRU, Eviction


class StateSlots:
    """Pool of slots, each for the recurrent state of one sequence.

    A running sequence holds one slot. A *snapshot* is a copy of its state in another slot, taken at a block boundary
    and registered under that block's digest. A sequence with the same prefix starts from the snapshot and the KV blocks
    before it. No sequence references a snapshot, so it can be evicted when a sequence needs a slot.

    Args:
        num_slots: slots on every rank.
        num_host_slots: slots in host memory, for sequences that are swapped out.
        interval: tokens between two snapshots of a sequence; one more is taken at the end of its prompt.
        eviction: makes the object that chooses which snapshot is evicted next.
    """

    def __init__(
        self, num_slots: int, num_host_slots: int = 0, interval: int = 1024, eviction: Callable[[], Eviction] = LRU
    ):
        self.slots = BlockManager(num_slots, 1, eviction=eviction)
        self.host = BlockManager(num_host_slots, 1, prefix_caching=False)
        self.interval = interval

    def num_restorable(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks up to the last one of ``digests`` that has a snapshot; 0 without any."""
        for count in range(len(digests), 0, -1):
            if self.slots.find(digests[count - 1 : count]):
                return count
        return 0

    def take(self, digest: bytes | None) -> tuple[int, int | None] | None:
        """Allocate a slot. Returns it and the snapshot of ``digest`` to copy into it, if there is one. Returns None without room.

        If no other slot is free, the sequence takes over the slot of the snapshot itself.
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
        """Allocate a slot for a snapshot of ``digest``. Returns None if there is one already, or if no slot is free or evictable."""
        if self.slots.find([digest]):
            return None
        slots = self.slots.allocate(1)
        if slots is None:
            return None
        self.slots.register(slots[0], digest)
        self.slots.free(slots)
        return slots[0]
