"""BlockTables: admits, extends, forks, shifts, swaps and releases sequences over pools of KV blocks and states.

Workers hold the contents. Copies and swaps are recorded as ``CacheMove`` and sent with the next plan. Without room an
operation returns False and changes nothing; the caller decides what to preempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from labinfer.base.plan import CacheMove, MoveKind
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_table import BlockGroup, BlockTable, SequenceCache
from labinfer.engine.state_slots import StateSlots
from labinfer.engine.windowed_blocks import WindowedBlocks


class BlockTables:
    """Allocates, shares, truncates, shifts and swaps the blocks of sequences.

    Args:
        blocks: the pool that attention reads.
        host: the host-memory pool for swapped-out sequences.
        states: slots for recurrent states; None if no layer keeps any.
        windows: pools of the sliding-window layers; None if these layers have no separate blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        host: BlockManager,
        states: StateSlots | None = None,
        windows: WindowedBlocks | None = None,
    ):
        self.blocks, self.host, self.states, self.windows = blocks, host, states, windows
        self._groups = [BlockGroup(blocks, host), *([windows.group] if windows else [])]
        self._moves: list[CacheMove] = []
        self._snapshots: list[tuple[int, bytes]] = []

    def _tables(self, cache: SequenceCache) -> Iterator[tuple[BlockGroup, BlockTable]]:
        """Block tables of a sequence, each with its group of layers."""
        return zip(self._groups, (cache, cache.windowed), strict=False)

    def take_moves(self) -> list[CacheMove]:
        """Return the moves recorded since the last call, in order; called once a step is composed. Also records
        snapshots of that step's states as moves of the next step, and frees window blocks that no later token needs."""
        moves, self._moves = self._moves, []
        if self.windows is not None:
            self.windows.free_unseen()
        for slot, digest in self._snapshots:
            snapshot = self.states.snapshot(digest)
            if snapshot is not None:
                self._moves.append(CacheMove("copy_state", [slot], [snapshot]))
        self._snapshots = []
        return moves

    @property
    def free_fraction(self) -> float:
        """Smallest fraction of free or evictable blocks over all groups of layers."""
        return min(group.blocks.num_free / max(1, group.blocks.num_blocks) for group in self._groups)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence holds a block or a slot in any pool."""
        pools = [pool for group in self._groups for pool in (group.blocks, group.host)]
        pools += [self.states.slots, self.states.host] if self.states else []
        return all(pool.num_free == pool.num_blocks for pool in pools)

    def has_room(self, cache: SequenceCache, num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens fit without any prefix-cache hit."""
        if not self.can_share() or self.blocks.blocks_for(num_tokens) > self.blocks.num_free:
            return False
        return self.windows is None or self.windows.has_room(cache, [], num_tokens)

    def admit(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int, find: bool = True) -> bool:
        """Allocate blocks for the first ``num_tokens`` tokens of a sequence. Shares cached blocks of other sequences,
        or swaps the sequence in. ``cache.num_tokens`` is then the number of its tokens in the cache.

        Args:
            find: whether to look up the prefix cache.
        """
        if not self.can_share():
            return False
        swapped, shared, digests = cache.host_blocks, [], []
        num_findable = self.blocks.full_blocks(num_tokens - 1)  # the last token is always run, for its logits
        if find and not swapped:  # a cached block may be written by this very step, after its moves
            digests = self._digests(cache, token_ids, num_findable)
            shared = self._find(cache, digests)
        if self.windows is not None and not self.windows.has_room(cache, digests[: len(shared)], num_tokens):
            return False
        blocks = self.blocks.acquire(shared, max(self.blocks.blocks_for(num_tokens), len(swapped)) - len(shared))
        if blocks is None:
            return False
        if self.states is not None:
            self._take_state(cache, cache.digests[len(shared) - 1] if shared else None)
        cache.last_snapshot = self.blocks.tokens_in(num_findable)
        returned = [blocks[: len(swapped)]]
        if self.windows is not None:
            returned.append(self.windows.admit(cache, digests[: len(shared)], num_tokens))
        cache.blocks = blocks
        if swapped:
            for (group, table), dest in zip(self._tables(cache), returned, strict=True):
                if dest:
                    self._moves.append(CacheMove(group.swap_in, table.host_blocks, dest))
                group.host.free(table.host_blocks)
                table.host_blocks = []
            self._register(cache, 0, cache.num_registered)
        else:
            cache.num_registered = len(shared)
            cache.num_tokens = self.blocks.tokens_in(len(shared))
        return True

    def _find(self, cache: SequenceCache, digests: Sequence[bytes]) -> list[int]:
        """Cached blocks of the longest prefix of ``digests`` from which all layers can continue. Layers with recurrent states
        need a snapshot at its end; sliding-window layers need the window blocks before its end."""
        shared, length = self.blocks.find(digests), None
        while length != len(shared):
            length = len(shared)
            if self.states is not None:
                shared = shared[: self.states.num_restorable(digests[: len(shared)])]
            if self.windows is not None:
                shared = shared[: self.windows.find(cache, digests[: len(shared)])]
        return shared

    def reserve(self, cache: SequenceCache, count: int) -> bool:
        """Allocate blocks for ``count`` more tokens, with copy-on-write of a shared last block."""
        missing = cache.num_missing(self.blocks, cache.num_tokens, count)
        if missing and missing > self.blocks.num_free:
            return False
        if self.windows is not None:
            group, table = self.windows.group, cache.windowed
            missing_windows = table.num_missing(group.blocks, cache.num_tokens, count)
            if missing_windows > group.blocks.num_free:
                return False
            if (copy := table.reserve(group.blocks, cache.num_tokens, missing_windows)) is not None:
                self._copy(group.copy, *copy)
        if (copy := cache.reserve(self.blocks, cache.num_tokens, missing)) is not None:
            self._copy("copy", *copy)
        return True

    def reuse_newly_cached(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int) -> int:
        """Share blocks that other sequences have cached since the sequence of ``cache`` was admitted. Returns how many tokens need not be run.

        Args:
            num_tokens: number of the sequence's tokens that have blocks; the last token is always run.
        """
        first = self.blocks.full_blocks(cache.num_tokens)
        if self.states is not None or cache.num_dropped or first != cache.num_registered:
            return 0
        digests = self._digests(cache, token_ids, self.blocks.full_blocks(num_tokens - 1))
        shared = self.blocks.find(digests[first:])
        if self.windows is not None:
            shared = shared[: self.windows.find(cache, digests[: first + len(shared)], first) - first]
        if not shared:
            return 0
        last = first + len(shared)
        if self.windows is not None:
            self.windows.reuse_newly_cached(cache, digests[:last], first)
        own, cache.blocks[first:last] = cache.blocks[first:last], self.blocks.acquire(shared, 0)
        self.blocks.free(own)
        cache.num_known, cache.num_registered = min(cache.num_known, first), last
        num_before, cache.num_tokens = cache.num_tokens, self.blocks.tokens_in(last)
        return cache.num_tokens - num_before

    def advance(self, cache: SequenceCache, token_ids: Sequence[int], count: int) -> None:
        """Count ``count`` more tokens as written by the step that is being composed, and register full blocks.

        Tokens beyond ``token_ids`` are drafted; their blocks are registered once the tokens are verified. All other
        full blocks can be shared at once: a sequence that shares them runs in this step or a later one. Every stage
        runs steps in order, and each layer writes keys and values before it reads any.
        """
        cache.num_tokens += count
        full = self.blocks.full_blocks(min(cache.num_tokens, len(token_ids)))
        if full > cache.num_registered and not cache.num_dropped and self.blocks.prefix_caching:
            self._digests(cache, token_ids, full)
            self._register(cache, cache.num_registered, full)
            cache.num_registered = full
        if self.windows is not None:
            self.windows.advance(cache, min(cache.num_tokens, len(token_ids) - cache.num_dropped))
        if self.states is not None and self._is_snapshot(cache):
            self._snapshots.append((cache.state_slot, cache.digests[self.blocks.full_blocks(cache.num_tokens) - 1]))

    def chunk_limit(self, cache: SequenceCache) -> int | None:
        """Number of tokens until the next snapshot of the recurrent state, where a prefill chunk must end; None for no limit."""
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
        """Tokens between two snapshots, rounded up to whole blocks."""
        return self.blocks.tokens_in(self.blocks.blocks_for(self.states.interval))

    def _take_state(self, cache: SequenceCache, digest: bytes | None) -> None:
        """Allocate a state slot, and restore the swapped-out state or the snapshot of ``digest`` into that slot, if either exists."""
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
        """Let the empty ``dest`` share the blocks of the first ``num_tokens`` tokens of ``source``; copies nothing.

        If layers keep states, ``num_tokens`` is 0 or all tokens of ``source``, and ``can_share`` must be true.
        """
        assert not (dest.blocks or dest.host_blocks) and num_tokens <= self.blocks.tokens_in(len(source.blocks))
        if self.windows is not None and num_tokens:
            assert self.windows.first_seen(source, num_tokens) >= source.windowed.num_freed, "a window has no blocks"
        if self.states is not None and num_tokens:
            assert num_tokens == source.num_tokens, "a state is that of all tokens"
            dest.state_slot, _ = self.states.take(None)
            self._moves.append(CacheMove("copy_state", [source.state_slot], [dest.state_slot]))
        full = self.blocks.full_blocks(num_tokens)
        for (group, from_table), (_, to_table) in zip(self._tables(source), self._tables(dest), strict=True):
            end = group.blocks.blocks_for(num_tokens)
            num_freed = min(from_table.num_freed, end)
            group.blocks.fork(from_table.blocks[num_freed:end])
            to_table.blocks, to_table.num_freed, to_table.num_known = from_table.blocks[:end], num_freed, 0
        dest.num_tokens, dest.salt = num_tokens, source.salt
        dest.num_dropped = source.num_dropped if num_tokens else 0
        dest.digests, dest.num_registered = source.digests[:full], min(source.num_registered, full)
        dest.keeps_windows, dest.last_snapshot = source.keeps_windows, source.last_snapshot

    def can_share(self) -> bool:
        """Whether a state slot is free for another sequence; True if no layer keeps recurrent states."""
        return self.states is None or self.states.slots.num_free > 0

    def truncate(self, cache: SequenceCache, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` tokens. With recurrent states, roll back to the saved state; ``cache.num_again``
        tokens must then be run again."""
        assert num_tokens <= cache.num_tokens and not cache.host_blocks
        if self.states is not None:
            assert cache.saved_slot is not None and cache.num_saved <= num_tokens, "a state cannot go back"
            self._moves.append(CacheMove("copy_state", [cache.saved_slot], [cache.state_slot]))
            self.drop_saved(cache)
            cache.num_again, num_tokens = num_tokens - cache.num_saved, cache.num_saved
        full = self.blocks.full_blocks(num_tokens)
        for group, table in self._tables(cache):
            table.truncate(group.blocks, num_tokens)
        del cache.digests[full:]  # other tokens may fill these blocks next
        cache.num_tokens, cache.num_registered = num_tokens, min(cache.num_registered, full)

    def draft_limit(self, cache: SequenceCache) -> int | None:
        """Maximum number of drafted tokens after the scheduled ones, so that no state snapshot covers a drafted token; None
        for no limit, 0 if no slot is free to save the recurrent state."""
        if self.states is None:
            return None
        if not self.states.slots.num_free or self._is_snapshot(cache):
            return 0
        limit = self.chunk_limit(cache)
        return None if limit is None else limit - 1

    def save_state(self, cache: SequenceCache, num_tokens: int) -> None:
        """Save the recurrent state, which covers ``num_tokens`` tokens, before a step that runs drafted tokens."""
        if self.states is None:
            return
        [cache.saved_slot] = self.states.slots.allocate(1)
        cache.num_saved = num_tokens
        self._moves.append(CacheMove("copy_state", [cache.state_slot], [cache.saved_slot]))

    def drop_saved(self, cache: SequenceCache) -> None:
        """Free the saved copy of a sequence's recurrent state, if there is one."""
        if cache.saved_slot is not None:
            self.states.slots.free([cache.saved_slot])
            cache.saved_slot = None

    def release(self, cache: SequenceCache) -> None:
        """Free all blocks and slots of a sequence, in all pools; keeps its digests."""
        for group, table in self._tables(cache):
            table.release(group)
        self._free_state(cache)
        cache.num_tokens = cache.num_dropped = cache.num_registered = cache.num_again = 0

    def keep(self, kept: Collection[SequenceCache], among: Iterable[SequenceCache]) -> None:
        """Release each cache of ``among`` that is not in ``kept``."""
        for cache in among:
            if cache not in kept:
                self.release(cache)

    def reserve_for_shift(self, cache: SequenceCache, num_behind: int) -> None:
        """Prepare a sequence for context shifts that keep ``num_behind`` tokens after the removed ones. If a sliding window is
        longer than ``num_behind``, a shift brings earlier tokens back into it, so the sequence keeps all its window blocks."""
        cache.keeps_windows = self.windows is not None and not self.windows.fits_in(num_behind)

    def shift(self, cache: SequenceCache, begin: int, end: int) -> bool:
        """Remove the tokens at positions ``begin`` to ``end`` (exclusive). Re-rotates later tokens, which move down.

        Args:
            begin, end: multiples of the block size.
        """
        first, last = self.blocks.full_blocks(begin), self.blocks.full_blocks(end)
        assert self.states is None, "no token can be taken out of a state"
        assert begin == self.blocks.tokens_in(first) and end == self.blocks.tokens_in(last), (
            "shifts are in whole blocks"
        )
        assert begin < end <= cache.num_tokens, "a shift takes out tokens of the cache"
        if self.windows is not None:
            self.windows.free_before(cache, cache.num_tokens)
            assert cache.windowed.num_freed >= last or not cache.windowed.num_freed, "kept tokens have no blocks"
        for group, table in self._tables(cache):
            if table.copies_for_shift(group.blocks, begin, end, cache.num_tokens) > group.blocks.num_free:
                return False
        for group, table in self._tables(cache):
            moved, dest = table.shift(group.blocks, begin, end, cache.num_tokens)
            if moved:
                self._moves.append(CacheMove(group.copy, moved, dest, begin - end))
        cache.num_tokens -= end - begin
        cache.num_dropped += end - begin
        cache.num_registered = min(cache.num_registered, first)
        return True

    def swap_out(self, cache: SequenceCache) -> bool:
        """Swap the blocks of a sequence, and its state if it has one, out to the host pools."""
        used = self.blocks.blocks_for(cache.num_tokens)
        if self.states is not None and not self.states.host.num_free:
            return False
        tables = list(self._tables(cache))
        if not used or any(group.host.num_free < used - table.num_freed for group, table in tables):
            return False
        if self.states is not None:
            [cache.host_state_slot] = self.states.host.allocate(1)
            self._moves.append(CacheMove("swap_out_state", [cache.state_slot], [cache.host_state_slot]))
            self.states.slots.free([cache.state_slot])
            cache.state_slot = None
        for group, table in tables:
            moved = table.blocks[table.num_freed : used]
            table.host_blocks = group.host.allocate(len(moved))
            if moved:
                self._moves.append(CacheMove(group.swap_out, moved, table.host_blocks))
            group.blocks.free(table.in_use)
            table.blocks, table.num_known = [], 0
        return True

    def check_integrity(self, caches: Iterable[SequenceCache]) -> None:
        """Assert that the blocks in use are exactly those of ``caches``, with matching reference counts."""
        caches = list(caches)
        pools = []
        for number, group in enumerate(self._groups):
            tables = [(cache, cache.windowed)[number] for cache in caches]
            pools += [(group.blocks, [table.in_use for table in tables]), (group.host, [t.host_blocks for t in tables])]
        if self.states is not None:
            own = [slot for cache in caches for slot in (cache.state_slot, cache.saved_slot)]
            slots = (own, [cache.host_state_slot for cache in caches])
            for pool, of_caches in zip((self.states.slots, self.states.host), slots, strict=True):
                pools.append((pool, [[slot for slot in of_caches if slot is not None]]))
            assert all((cache.state_slot is None) == (not cache.blocks) for cache in caches), "blocks without a state"
        for pool, tables in pools:
            pool.check_integrity()
            pool.check_ref_counts(block for table in tables for block in table)

    def _copy(self, kind: MoveKind, source: int, dest: int) -> None:
        """Record a copy of block ``source`` to ``dest``, as part of the last recorded move if the order of both copies does not matter."""
        last = self._moves[-1] if self._moves else None
        if (
            last
            and last.kind == kind
            and not last.shift
            and not {source, dest} & {*last.dest} | {dest} & {*last.source}
        ):
            last.source.append(source)
            last.dest.append(dest)
        else:
            self._moves.append(CacheMove(kind, [source], [dest]))

    def _digests(self, cache: SequenceCache, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Digests of the first ``num_blocks`` full blocks; empty without prefix caching."""
        if not self.blocks.prefix_caching:
            return []
        self.blocks.extend_chain(cache.digests, token_ids, cache.salt, num_blocks)
        return cache.digests[:num_blocks]

    def _register(self, cache: SequenceCache, begin: int, end: int) -> None:
        for index in range(begin, end):
            self.blocks.register(cache.blocks[index], cache.digests[index])
        if self.windows is not None:
            self.windows.register(cache, begin, end)
