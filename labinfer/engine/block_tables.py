"""Which blocks hold which sequence's keys and values: operations on sequences, over two pools of blocks.

The blocks live on the workers. What is to happen to their contents is noted as ``CacheMove`` and goes out with the next
plan. Where there is no room an operation returns False and has changed nothing: whom to preempt is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from labinfer.engine.block_manager import BlockManager, extend_chain
from labinfer.engine.state_slots import StateSlots
from labinfer.plan import CacheMove


@dataclass(eq=False, kw_only=True)
class SequenceCache:
    """Places of the keys and values of one sequence."""

    salt: str = ""
    """Only sequences with the same salt find each other's blocks."""
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens whose keys and values are there or on their way; also the position of the next one."""
    num_dropped: int = 0
    """Tokens that were shifted out of the context."""
    num_known: int = 0
    """Number of ``blocks`` that the workers know."""
    host_blocks: list[int] = field(default_factory=list)
    """Blocks of the host pool, while the sequence is swapped out."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of its first full blocks, as far as they were needed; see ``block_manager.extend_chain``."""
    num_registered: int = 0
    """Blocks that others can find."""
    state_slot: int | None = None
    """Slot of its state, with layers that keep one; see ``state_slots.StateSlots``."""
    host_state_slot: int | None = None
    """Slot of its state in the host pool, while it is swapped out."""
    last_snapshot: int = 0
    """Tokens before the last block end of those it was admitted with: a snapshot is taken there."""
    saved_slot: int | None = None
    """Slot with a copy of its state, to which it can go back."""
    num_saved: int = 0
    """Tokens that are in that state."""
    num_again: int = 0
    """Tokens that it went back by and that are right: they are run again."""


class BlockTables:
    """Shares, copies, cuts, shifts and swaps the blocks of sequences.

    Args:
        blocks: the pool that attention reads.
        host: the pool in host memory that sequences are swapped out to.
        states: slots for the states of sequences; None where no layer keeps any.
    """

    def __init__(self, blocks: BlockManager, host: BlockManager, states: StateSlots | None = None):
        self.blocks, self.host, self.states = blocks, host, states
        self._moves: list[CacheMove] = []
        self._snapshots: list[tuple[int, bytes]] = []

    def take_moves(self) -> list[CacheMove]:
        """Moves noted since the last call, in order. Snapshots of what the next step leaves are noted for the one after."""
        moves, self._moves = self._moves, []
        for slot, digest in self._snapshots:
            snapshot = self.states.snapshot(digest)
            if snapshot is not None:
                self._moves.append(CacheMove("copy_state", [slot], [snapshot]))
        self._snapshots = []
        return moves

    @property
    def is_idle(self) -> bool:
        """Whether no sequence holds anything, in either pool."""
        pools = [self.blocks, self.host, *([self.states.slots, self.states.host] if self.states else [])]
        return all(pool.num_free == pool.num_blocks for pool in pools)

    def admit(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int, find: bool = True) -> bool:
        """Blocks for its first ``num_tokens`` tokens. What other sequences have computed is shared, or, if it was swapped
        out, that comes back; ``cache.num_tokens`` says how many tokens that makes.

        Args:
            find: whether to look for blocks of others.
        """
        if not self.can_share():
            return False
        swapped, shared = cache.host_blocks, []
        if find and not swapped:  # what is found may be written in this very step, too late for a move
            digests = self._digests(cache, token_ids, (num_tokens - 1) // self.blocks.block_size)  # one token is run
            shared = self.blocks.find(digests)
            if self.states is not None:
                shared = shared[: self.states.deepest(digests[: len(shared)])]
        blocks = self.blocks.hold(shared, max(self.blocks.blocks_for(num_tokens), len(swapped)) - len(shared))
        if blocks is None:
            return False
        if self.states is not None:
            self._take_state(cache, cache.digests[len(shared) - 1] if shared else None)
        cache.last_snapshot = (num_tokens - 1) // self.blocks.block_size * self.blocks.block_size
        cache.blocks = blocks
        if swapped:
            self._moves.append(CacheMove("swap_in", swapped, blocks[: len(swapped)]))
            self._register(cache, range(cache.num_registered))
            self.host.free(swapped)
            cache.host_blocks = []
        else:
            cache.num_registered = len(shared)
            cache.num_tokens = len(shared) * self.blocks.block_size
        return True

    def reserve(self, cache: SequenceCache, count: int) -> bool:
        """Room to write ``count`` more tokens: new blocks, and an own copy of the last one if it is shared."""
        index = cache.num_tokens // self.blocks.block_size
        begun = cache.num_tokens % self.blocks.block_size > 0
        copied = begun and self.blocks.is_shared(cache.blocks[index])
        if begun and not copied:
            self.blocks.unregister(cache.blocks[index])
        missing = max(0, self.blocks.blocks_for(cache.num_tokens + count) - len(cache.blocks))
        if not (missing or copied):
            return True
        new = self.blocks.allocate(missing + copied)
        if new is None:
            return False
        if copied:
            self._copy(cache.blocks[index], new[0])
            self.blocks.free([cache.blocks[index]])
            cache.blocks[index] = new.pop(0)
            cache.num_known = min(cache.num_known, index)
        cache.blocks += new
        return True

    def catch_up(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int) -> int:
        """Share what others have computed since it was admitted; returns how many tokens need not be run.

        Args:
            num_tokens: tokens it has blocks for; the last one is always run.
        """
        size = self.blocks.block_size
        first = cache.num_tokens // size
        if self.states is not None or cache.num_dropped or first != cache.num_registered:
            return 0
        digests = self._digests(cache, token_ids, (num_tokens - 1) // size)
        shared = self.blocks.find(digests[first:])
        if not shared:
            return 0
        last = first + len(shared)
        own, cache.blocks[first:last] = cache.blocks[first:last], self.blocks.hold(shared, 0)
        self.blocks.free(own)
        cache.num_known, cache.num_registered = min(cache.num_known, first), last
        num_found, cache.num_tokens = last * size - cache.num_tokens, last * size
        return num_found

    def advance(self, cache: SequenceCache, token_ids: Sequence[int], count: int) -> None:
        """The next ``count`` tokens are written by the step that is being composed; others can find the full blocks.

        Tokens beyond ``token_ids`` are drafted: their blocks are not found before the tokens have been verified. The others
        are at once: whoever finds them runs in this step or a later one, and every stage runs steps in order, in each layer
        writing keys and values before it reads any.
        """
        size = self.blocks.block_size
        cache.num_tokens += count
        full = min(cache.num_tokens, len(token_ids)) // size
        if full > cache.num_registered and not cache.num_dropped and self.blocks.prefix_caching:
            self._digests(cache, token_ids, full)
            self._register(cache, range(cache.num_registered, full))
            cache.num_registered = full
        if self.states is not None and self._is_snapshot(cache):
            self._snapshots.append((cache.state_slot, cache.digests[cache.num_tokens // size - 1]))

    def chunk_limit(self, cache: SequenceCache) -> int | None:
        """Tokens up to the next snapshot, where a chunk has to end; None for any number."""
        if self.states is None or not self.blocks.prefix_caching:
            return None
        interval = self._interval
        to_next = interval - cache.num_tokens % interval
        to_last = cache.last_snapshot - cache.num_tokens
        return min(to_next, to_last) if to_last > 0 else to_next

    def _is_snapshot(self, cache: SequenceCache) -> bool:
        at_end = cache.num_tokens == cache.last_snapshot or cache.num_tokens % self._interval == 0
        return self.blocks.prefix_caching and cache.num_tokens > 0 and at_end

    @property
    def _interval(self) -> int:
        """Tokens from one snapshot to the next, in whole blocks."""
        return self.blocks.blocks_for(self.states.interval) * self.blocks.block_size

    def _take_state(self, cache: SequenceCache, digest: bytes | None) -> None:
        """A slot for its state: what was swapped out, or the snapshot of ``digest``, or whatever is in it."""
        taken = self.states.take(digest)
        assert taken is not None, "there is no slot"
        cache.state_slot, snapshot = taken
        if cache.host_state_slot is not None:
            self._moves.append(CacheMove("swap_in_state", [cache.host_state_slot], [cache.state_slot]))
            self.states.host.free([cache.host_state_slot])
            cache.host_state_slot = None
        elif snapshot is not None:
            self._moves.append(CacheMove("copy_state", [snapshot], [cache.state_slot]))

    def _free_state(self, cache: SequenceCache) -> None:
        if cache.state_slot is not None:
            self.states.slots.free([cache.state_slot])
        self.drop_saved(cache)
        if cache.host_state_slot is not None:
            self.states.host.free([cache.host_state_slot])
        cache.state_slot = cache.host_state_slot = None

    def share(self, source: SequenceCache, dest: SequenceCache, num_tokens: int) -> None:
        """``dest``, which holds nothing, gets the first ``num_tokens`` tokens of ``source``; no block is copied yet.

        With states all tokens or none, and ``can_share`` before.
        """
        assert not (dest.blocks or dest.host_blocks) and num_tokens <= len(source.blocks) * self.blocks.block_size
        if self.states is not None and num_tokens:
            assert num_tokens == source.num_tokens, "a state is that of all tokens"
            dest.state_slot, _ = self.states.take(None)
            dest.last_snapshot = source.last_snapshot
            self._moves.append(CacheMove("copy_state", [source.state_slot], [dest.state_slot]))
        full = num_tokens // self.blocks.block_size
        dest.blocks = self.blocks.hold(source.blocks[: self.blocks.blocks_for(num_tokens)], 0)
        dest.num_tokens, dest.salt = num_tokens, source.salt
        dest.num_dropped = source.num_dropped if num_tokens else 0
        dest.digests, dest.num_registered = source.digests[:full], min(source.num_registered, full)
        dest.num_known = 0

    def can_share(self) -> bool:
        """Whether there is a slot for the state of another sequence, if it needs one."""
        return self.states is None or self.states.slots.num_free > 0

    def truncate(self, cache: SequenceCache, num_tokens: int) -> None:
        """Only the first ``num_tokens`` tokens stay; with states those that are in the saved one, and the others are run again."""
        assert num_tokens <= cache.num_tokens and not cache.host_blocks
        if self.states is not None:
            assert cache.saved_slot is not None and cache.num_saved <= num_tokens, "a state cannot go back"
            self._moves.append(CacheMove("copy_state", [cache.saved_slot], [cache.state_slot]))
            self.drop_saved(cache)
            cache.num_again, num_tokens = num_tokens - cache.num_saved, cache.num_saved
        kept, full = self.blocks.blocks_for(num_tokens), num_tokens // self.blocks.block_size
        self.blocks.free(cache.blocks[kept:])
        del cache.blocks[kept:], cache.digests[full:]  # what comes next may be other tokens
        cache.num_tokens, cache.num_registered = num_tokens, min(cache.num_registered, full)
        cache.num_known = min(cache.num_known, kept)

    def draft_limit(self, cache: SequenceCache) -> int | None:
        """Tokens that may be drafted behind those that are to be run: none that a snapshot would hold; None for any number."""
        if self.states is None:
            return None
        if not self.states.slots.num_free or self._is_snapshot(cache):
            return 0
        limit = self.chunk_limit(cache)
        return None if limit is None else limit - 1

    def save_state(self, cache: SequenceCache, num_tokens: int) -> None:
        """Before a step that runs drafted tokens: keep the state, which has ``num_tokens`` tokens in it, to go back to."""
        if self.states is None:
            return
        [cache.saved_slot] = self.states.slots.allocate(1)
        cache.num_saved = num_tokens
        self._moves.append(CacheMove("copy_state", [cache.state_slot], [cache.saved_slot]))

    def drop_saved(self, cache: SequenceCache) -> None:
        """Free the copy of its state, if there is one."""
        if cache.saved_slot is not None:
            self.states.slots.free([cache.saved_slot])
            cache.saved_slot = None

    def release(self, cache: SequenceCache) -> None:
        """Free all blocks of a sequence, in both pools; the digests of its tokens stay."""
        self.blocks.free(cache.blocks)
        self.host.free(cache.host_blocks)
        self._free_state(cache)
        cache.blocks, cache.host_blocks = [], []
        cache.num_tokens = cache.num_dropped = cache.num_known = cache.num_registered = cache.num_again = 0

    def keep(self, kept: Collection[SequenceCache], among: Iterable[SequenceCache]) -> None:
        """Release all others."""
        for cache in among:
            if cache not in kept:
                self.release(cache)

    def shift(self, cache: SequenceCache, begin: int, end: int) -> bool:
        """Take the tokens at positions ``begin`` up to ``end`` out; those after them move down, their keys rotated.

        Args:
            begin, end: multiples of the block size.
        """
        size = self.blocks.block_size
        assert self.states is None, "no token can be taken out of a state"
        assert begin % size == end % size == 0 and begin < end <= cache.num_tokens, "shifts are in whole blocks"
        first, last, filled = begin // size, end // size, self.blocks.blocks_for(cache.num_tokens)
        removed, moved = cache.blocks[first:last], cache.blocks[last:filled]
        shared = [block for block in moved if self.blocks.is_shared(block)]
        freed = sum(not self.blocks.is_shared(block) for block in removed)
        if len(shared) > self.blocks.num_free + freed:
            return False
        self.blocks.free(removed)
        copies = dict(zip(shared, self.blocks.allocate(len(shared)), strict=True))
        self.blocks.free(shared)
        for block in moved:
            if block not in copies:
                self.blocks.unregister(block)
        dest = [copies.get(block, block) for block in moved]
        if moved:
            self._moves.append(CacheMove("copy", moved, dest, begin - end))
        cache.blocks = [*cache.blocks[:first], *dest, *cache.blocks[filled:]]
        cache.num_tokens -= end - begin
        cache.num_dropped += end - begin
        cache.num_known, cache.num_registered = min(cache.num_known, first), min(cache.num_registered, first)
        return True

    def swap_out(self, cache: SequenceCache) -> bool:
        """Move the blocks of a sequence, and its state if it has one, to the host pools."""
        used = self.blocks.blocks_for(cache.num_tokens)
        if self.states is not None and not self.states.host.num_free:
            return False
        host_blocks = self.host.allocate(used)
        if not host_blocks:
            return False
        if self.states is not None:
            [cache.host_state_slot] = self.states.host.allocate(1)
            self._moves.append(CacheMove("swap_out_state", [cache.state_slot], [cache.host_state_slot]))
            self.states.slots.free([cache.state_slot])
            cache.state_slot = None
        self._moves.append(CacheMove("swap_out", cache.blocks[:used], host_blocks))
        self.blocks.free(cache.blocks)
        cache.blocks, cache.host_blocks, cache.num_known = [], host_blocks, 0
        return True

    def check_integrity(self, caches: Iterable[SequenceCache]) -> None:
        """Assert that every block in use is held by these sequences, by as many as its count says."""
        caches = list(caches)
        pools = [
            (self.blocks, [cache.blocks for cache in caches]),
            (self.host, [cache.host_blocks for cache in caches]),
        ]
        if self.states is not None:
            own = [slot for cache in caches for slot in (cache.state_slot, cache.saved_slot)]
            slots = (own, [cache.host_state_slot for cache in caches])
            for pool, of_caches in zip((self.states.slots, self.states.host), slots, strict=True):
                pools.append((pool, [[slot for slot in of_caches if slot is not None]]))
            assert all((cache.state_slot is None) == (not cache.blocks) for cache in caches), "blocks without a state"
        for pool, tables in pools:
            pool.check_integrity()
            pool.check_holders(block for table in tables for block in table)

    def _copy(self, source: int, dest: int) -> None:
        """Note the copy of a block, together with those before it where the order does not matter."""
        last = self._moves[-1] if self._moves else None
        if (
            last
            and last.kind == "copy"
            and not last.shift
            and not {source, dest} & {*last.dest} | {dest} & {*last.source}
        ):
            last.source.append(source)
            last.dest.append(dest)
        else:
            self._moves.append(CacheMove("copy", [source], [dest]))

    def _digests(self, cache: SequenceCache, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Digests of its first full blocks; none where nothing is to be found."""
        if not self.blocks.prefix_caching:
            return []
        extend_chain(cache.digests, token_ids, self.blocks.block_size, cache.salt, num_blocks)
        return cache.digests[:num_blocks]

    def _register(self, cache: SequenceCache, indices: Iterable[int]) -> None:
        for index in indices:
            self.blocks.register(cache.blocks[index], cache.digests[index])
