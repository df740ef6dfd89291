"""Operations on sequences' KV blocks: what they hold after each, what is told to the workers, and what no room means."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from labinfer.base.plan import CacheMove
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.block_tables import BlockTables

TOKENS = list(range(100, 200))


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """Tokens and blocks of a sequence, those that others hold too, and those in host memory."""

    num_tokens: int
    num_blocks: int
    num_shared: int
    num_host_blocks: int


def query(tables: BlockTables, cache: SequenceCache) -> CacheUse:
    return CacheUse(
        num_tokens=cache.num_tokens,
        num_blocks=len(cache.blocks),
        num_shared=sum(map(tables.blocks.is_shared, cache.blocks)),
        num_host_blocks=len(cache.host_blocks),
    )


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(BlockManager(8, 4), BlockManager(3, 4, prefix_caching=False))


def filled(tables: BlockTables, num_tokens: int, tokens=TOKENS) -> SequenceCache:
    """A sequence whose first tokens have run."""
    cache = SequenceCache()
    assert tables.admit(cache, tokens, num_tokens)
    tables.advance(cache, tokens, num_tokens - cache.num_tokens)
    return cache


def test_shared_prefix_takes_no_blocks_until_it_is_written_behind(tables):
    source, dest = filled(tables, 10), SequenceCache()
    tables.share(source, dest, 10)
    assert dest.blocks == source.blocks and tables.blocks.num_free == 5
    assert query(tables, dest) == CacheUse(num_tokens=10, num_blocks=3, num_shared=3, num_host_blocks=0)
    assert tables.reserve(dest, 1)
    copy = dest.blocks[2]
    assert tables.take_moves() == [CacheMove("copy", [source.blocks[2]], [copy])] and copy != source.blocks[2]
    assert query(tables, source) == CacheUse(num_tokens=10, num_blocks=3, num_shared=2, num_host_blocks=0)
    assert tables.reserve(source, 1) and not tables.take_moves()  # nobody else holds its last block any more
    tables.check_integrity([source, dest])


def test_prefix_may_end_within_a_block(tables):
    source, dest = filled(tables, 10), SequenceCache()
    tables.share(source, dest, 6)
    assert dest.blocks == source.blocks[:2]
    assert tables.reserve(dest, 4)
    assert tables.take_moves() == [CacheMove("copy", [source.blocks[1]], [dest.blocks[1]])]
    assert len(dest.blocks) == 3 and dest.blocks[0] == source.blocks[0]
    tables.check_integrity([source, dest])


def test_truncating_frees_whole_blocks_and_forgets_what_is_overwritten(tables):
    cache = filled(tables, 16)
    last = cache.blocks[3]
    tables.truncate(cache, 6)
    assert query(tables, cache) == CacheUse(num_tokens=6, num_blocks=2, num_shared=0, num_host_blocks=0)
    whole = SequenceCache()
    assert tables.admit(whole, TOKENS, 17) and whole.num_tokens == 16 and whole.blocks[3] == last  # all still known
    tables.release(whole)
    other = TOKENS[:6] + [1, 2, 3]
    assert tables.reserve(cache, 3)
    tables.advance(cache, other, 3)
    assert tables.admit(whole, TOKENS, 17) and whole.num_tokens == 4  # the second block holds other tokens now
    again = SequenceCache()
    assert tables.admit(again, other, 9) and again.num_tokens == 8
    tables.check_integrity([cache, whole, again])


def test_truncating_within_a_shared_block_leaves_it_to_the_other(tables):
    source, dest = filled(tables, 8), SequenceCache()
    tables.share(source, dest, 8)
    tables.truncate(dest, 5)
    assert tables.reserve(dest, 1)
    assert tables.take_moves() == [CacheMove("copy", [source.blocks[1]], [dest.blocks[1]])]
    tables.check_integrity([source, dest])


def test_released_blocks_are_free_and_others_are_kept(tables):
    caches = [filled(tables, 5, [n] * 9) for n in range(4)]
    tables.keep(caches[1:2], caches)
    assert [query(tables, cache).num_blocks for cache in caches] == [0, 2, 0, 0]
    assert tables.blocks.num_free == 6
    tables.check_integrity(caches)


def test_shift_turns_what_stays_in_place(tables):
    cache = filled(tables, 18)
    blocks = list(cache.blocks)
    assert tables.shift(cache, 4, 12)
    assert tables.take_moves() == [CacheMove("copy", blocks[3:], blocks[3:], -8)]
    assert cache.blocks == [blocks[0], *blocks[3:]]
    assert (cache.num_tokens, cache.num_dropped, cache.num_known) == (10, 8, 0)
    assert tables.blocks.num_free == 5
    found = SequenceCache()
    assert tables.admit(found, TOKENS, 18)
    assert found.num_tokens == 12  # the blocks that left are still known, those that were turned are not
    tables.check_integrity([cache, found])


def test_shift_copies_what_others_hold(tables):
    cache, other = filled(tables, 12), SequenceCache()
    tables.share(cache, other, 12)
    old = list(cache.blocks)
    assert tables.shift(cache, 0, 4)
    assert other.blocks == old and not set(cache.blocks) & set(old)
    assert tables.take_moves() == [CacheMove("copy", old[1:], cache.blocks, -4)]
    tables.check_integrity([cache, other])


def test_shifting_the_end_away_moves_nothing(tables):
    cache = filled(tables, 12)
    assert tables.shift(cache, 8, 12)
    assert tables.take_moves() == [] and cache.num_tokens == 8
    tables.check_integrity([cache])


def test_sequence_goes_to_the_host_and_comes_back(tables):
    cache = filled(tables, 10)
    blocks = list(cache.blocks)
    assert tables.swap_out(cache)
    assert query(tables, cache) == CacheUse(num_tokens=10, num_blocks=0, num_shared=0, num_host_blocks=3)
    assert tables.take_moves() == [CacheMove("swap_out", blocks, cache.host_blocks)]
    assert tables.blocks.num_free == 8 and tables.host.num_free == 0
    host = list(cache.host_blocks)
    assert tables.admit(cache, TOKENS, 11)
    assert tables.take_moves() == [CacheMove("swap_in", host, cache.blocks)]
    assert cache.num_tokens == 10 and tables.host.num_free == 3
    tables.check_integrity([cache])


def test_swapped_sequence_can_be_released(tables):
    cache = filled(tables, 10)
    tables.swap_out(cache)
    tables.release(cache)
    assert tables.host.num_free == 3 and tables.blocks.num_free == 8
    tables.check_integrity([cache])


@pytest.mark.parametrize("operation", ["admit", "reserve", "copy", "shift", "swap_out", "swap_in"])
def test_without_room_an_operation_is_refused_and_changes_nothing(tables, operation):
    if operation == "swap_in":
        cache = filled(tables, 10)
        tables.swap_out(cache)
        others = [filled(tables, 24, [7] * 24)]
    else:
        cache, others = filled(tables, 10), []
        if operation in ("copy", "shift"):
            others.append(SequenceCache())
            tables.share(cache, others[0], 10)
        if operation == "swap_out":
            others.append(filled(tables, 4, [5] * 4))
            tables.swap_out(others[0])
        others.append(filled(tables, 4 * tables.blocks.num_free, [7] * 99))
    newcomer = SequenceCache()
    tables.take_moves()
    before = [(list(c.blocks), list(c.host_blocks), c.num_tokens, c.num_dropped) for c in [cache, *others, newcomer]]
    done = {
        "admit": lambda: tables.admit(newcomer, [9] * 9, 1),
        "reserve": lambda: tables.reserve(cache, 4),
        "copy": lambda: tables.reserve(cache, 1),
        "shift": lambda: tables.shift(cache, 4, 8),
        "swap_out": lambda: tables.swap_out(cache),
        "swap_in": lambda: tables.admit(cache, TOKENS, 11),
    }[operation]()
    assert done is False
    assert tables.take_moves() == []
    after = [(list(c.blocks), list(c.host_blocks), c.num_tokens, c.num_dropped) for c in [cache, *others, newcomer]]
    assert after == before
    tables.check_integrity([cache, *others])


def test_count_that_disagrees_is_found(tables):
    cache = filled(tables, 10)
    with pytest.raises(AssertionError, match="reference counts disagree"):
        tables.check_integrity([])
    cache.blocks.append(cache.blocks[0])
    with pytest.raises(AssertionError, match="reference counts disagree"):
        tables.check_integrity([cache])
