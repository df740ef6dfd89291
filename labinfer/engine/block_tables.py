"""Blocks of the keys and values of sequences: operations on sequences, over pools of blocks.

The blocks live on the workers. What is to happen to their contents is noted as ``CacheMove`` and goes out with the next
plan. Where there is no room an operation returns False and has changed nothing: whom to preempt is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from labinfer.base.plan import CacheMove, MoveKind
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_table import BlockGroup, BlockTable, SequenceCache
from labinfer.engine.state_slots import StateSlots
from labinfer.engine.windowed_blocks import WindowedBlocks


class BlockTables:
    """Shares, copies, cuts, shifts and swaps the blocks of sequences.

    Args:
        blocks: the pool that attention reads.
        host: the pool in host memory that sequences are swapped out to.
        states: slots for the states of sequences; None where no layer keeps any.
        windows: the pools of the windowed layers; None where all layers hold the same tokens.
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
        """The tables of a sequence with their groups."""
        return zip(self._groups, (cache, cache.windowed), strict=False)

    def take_moves(self) -> list[CacheMove]:
        """Moves noted since the last call, in order: the step that they are for is composed. Snapshots of what it leaves are noted
        for the one after; what no token behind it sees is freed."""
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
        """Part of the KV blocks that is free, in the group that has the least."""
        return min(group.blocks.num_free / max(1, group.blocks.num_blocks) for group in self._groups)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence holds anything, in any pool."""
        pools = [pool for group in self._groups for pool in (group.blocks, group.host)]
        pools += [self.states.slots, self.states.host] if self.states else []
        return all(pool.num_free == pool.num_blocks for pool in pools)

    def has_room(self, cache: SequenceCache, num_tokens: int) -> bool:
        """Whether ``admit`` finds room for so many tokens, also where it finds none of them."""
        if not self.can_share() or self.blocks.blocks_for(num_tokens) > self.blocks.num_free:
            return False
        return self.windows is None or self.windows.has_room(cache, [], num_tokens)

    def admit(self, cache: SequenceCache, token_ids: Sequence[int], num_tokens: int, find: bool = True) -> bool:
        """Blocks for its first ``num_tokens`` tokens. What other sequences have computed is shared, or, if it was swapped
        out, that comes back; ``cache.num_tokens`` says how many tokens that makes.

        Args:
            find: whether to look for blocks of others.
        """
        if not self.can_share():
            return False
        swapped, shared, digests = cache.host_blocks, [], []
        num_findable = self.blocks.full_blocks(num_tokens - 1)  # one token is run
        if find and not swapped:  # what is found may be written in this very step, too late for a move
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
        """The known blocks of the longest prefix of this chain behind which all layers can go on."""
        shared, length = self.blocks.find(digests), None
        while length != len(shared):
            length = len(shared)
            if self.states is not None:
                shared = shared[: self.states.deepest(digests[: len(shared)])]
            if self.windows is not None:
                shared = shared[: self.windows.find(cache, digests[: len(shared)])]
        return shared

    def reserve(self, cache: SequenceCache, count: int) -> bool:
        """Room to write ``count`` more tokens: new blocks, and an own copy of the last one if it is shared."""
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
        """Share what others have computed since it was admitted; returns how many tokens need not be run.

        Args:
            num_tokens: tokens it has blocks for; the last one is always run.
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
        """The next ``count`` tokens are written by the step that is being composed; others can find the full blocks.

        Tokens beyond ``token_ids`` are drafted: their blocks are not found before the tokens have been verified. The others
        are at once: whoever finds them runs in this step or a later one, and every stage runs steps in order, in each layer
        writing keys and values before it reads any.
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
        return self.blocks.tokens_in(self.blocks.blocks_for(self.states.interval))

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
        full = self.blocks.full_blocks(num_tokens)
        for group, table in self._tables(cache):
            table.truncate(group.blocks, num_tokens)
        del cache.digests[full:]  # what comes next may be other tokens
        cache.num_tokens, cache.num_registered = num_tokens, min(cache.num_registered, full)

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
        """Free all blocks of a sequence, in all pools; the digests of its tokens stay."""
        for group, table in self._tables(cache):
            table.release(group)
        self._free_state(cache)
        cache.num_tokens = cache.num_dropped = cache.num_registered = cache.num_again = 0

    def keep(self, kept: Collection[SequenceCache], among: Iterable[SequenceCache]) -> None:
        """Release all others."""
        for cache in among:
            if cache not in kept:
                self.release(cache)

    def reserve_for_shift(self, cache: SequenceCache, num_behind: int) -> None:
        """Prepare a sequence for shifts that leave ``num_behind`` tokens behind those taken out. If a window reaches further back than
        these, blocks of the tokens in front are kept."""
        cache.keeps_windows = self.windows is not None and not self.windows.fits_in(num_behind)

    def shift(self, cache: SequenceCache, begin: int, end: int) -> bool:
        """Take the tokens at positions ``begin`` up to ``end`` out; those after them move down, their keys rotated.

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
        """Move the blocks of a sequence, and its state if it has one, to the host pools."""
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
        """Assert that every block in use is held by these sequences, by as many as its count says."""
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
        """Note the copy of a block, together with those before it where the order does not matter."""
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
        """Digests of its first full blocks; none where nothing is to be found."""
        if not self.blocks.prefix_caching:
            return []
        self.blocks.extend_chain(cache.digests, token_ids, cache.salt, num_blocks)
        return cache.digests[:num_blocks]

    def _register(self, cache: SequenceCache, begin: int, end: int) -> None:
        for index in range(begin, end):
            self.blocks.register(cache.blocks[index], cache.digests[index])
        if self.windows is not None:
            self.windows.register(cache, begin, end)
