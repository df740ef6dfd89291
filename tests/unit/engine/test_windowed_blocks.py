"""Blocks of windowed layers: how many a sequence holds, when they are freed, and what of a prompt is found again."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from labinfer.base.plan import CacheMove
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.block_tables import BlockTables
from labinfer.engine.cache_capacity import SlidingWindow
from labinfer.engine.windowed_blocks import WindowedBlocks

SIZE = 4
TOKENS = list(range(100, 200))


def make_tables(window: int = 6, num_blocks: int = 40, num_window_blocks: int = 12, chunk: int = 8) -> BlockTables:
    windows = WindowedBlocks(
        window, chunk, BlockManager(num_window_blocks, SIZE), BlockManager(6, SIZE, prefix_caching=False)
    )
    return BlockTables(BlockManager(num_blocks, SIZE), BlockManager(20, SIZE, prefix_caching=False), windows=windows)


def run(tables: BlockTables, cache: SequenceCache, num_tokens: int, chunk: int = 8) -> None:
    """Run a sequence's tokens up to this many, in steps of a chunk."""
    while cache.num_tokens < num_tokens:
        count = min(chunk, num_tokens - cache.num_tokens)
        assert tables.reserve(cache, count)
        tables.advance(cache, TOKENS, count)
        tables.take_moves()


def used(tables: BlockTables) -> int:
    return tables.windows.blocks.num_blocks - tables.windows.blocks.num_free


@pytest.mark.parametrize("window", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_sequence_holds_its_window_however_long_it_is(window, chunk):
    tables, cache = make_tables(window), SequenceCache()
    assert tables.admit(cache, TOKENS, 90)
    for num_tokens in range(1, 91):
        run(tables, cache, num_tokens, chunk)
        first = max(0, num_tokens - window + 1) // SIZE
        assert cache.windowed.num_freed == first and len(cache.blocks) == 23
        assert used(tables) == len(cache.windowed.in_use) <= SlidingWindow(window, SIZE).blocks_between_steps
    tables.check_integrity([cache])
    tables.release(cache)
    assert tables.is_idle


def test_blocks_that_a_step_reads_are_free_only_when_it_is_composed():
    tables, cache = make_tables(), SequenceCache()
    assert tables.admit(cache, TOKENS, 24) and used(tables) == 2
    assert tables.reserve(cache, 8)
    tables.advance(cache, TOKENS, 8)
    assert cache.windowed.num_freed == 0
    tables.take_moves()
    assert cache.windowed.num_freed == 0 and used(tables) == 2  # the next token is number 8, which sees 3 to 7
    run(tables, cache, 16)
    assert cache.windowed.num_freed == 2 and used(tables) == 2


def test_drafted_tokens_free_nothing_that_is_seen_without_them():
    tables, cache = make_tables(), SequenceCache()
    assert tables.admit(cache, TOKENS, 20)
    run(tables, cache, 20)
    assert tables.reserve(cache, 7)
    tables.advance(cache, TOKENS[:21], 7)  # six of them are drafted
    tables.take_moves()
    assert cache.windowed.num_freed == 4  # token 21 sees 16 to 20
    tables.truncate(cache, 21)
    assert used(tables) == 2
    tables.check_integrity([cache])


def test_prefix_is_found_where_its_last_window_is_known():
    tables, first = make_tables(num_window_blocks=4), SequenceCache()
    assert tables.admit(first, TOKENS, 24)
    run(tables, first, 24)
    tables.release(first)
    again = SequenceCache()
    assert tables.admit(again, TOKENS, 30) and again.num_tokens == 24
    assert again.windowed.num_freed == 4  # only the blocks of tokens 19 to 23 are held
    tables.release(again)
    part = SequenceCache()
    assert tables.admit(part, TOKENS, 10) and part.num_tokens == 0  # the windows of its tokens were taken since
    tables.release(part)


def test_swap_moves_a_window_and_brings_it_back():
    tables, cache = make_tables(), SequenceCache()
    assert tables.admit(cache, TOKENS, 22)
    run(tables, cache, 22)
    held = cache.windowed.in_use
    assert cache.windowed.num_freed == 4 and tables.swap_out(cache)
    out = tables.take_moves()
    assert [move.kind for move in out] == ["swap_out", "swap_out_window"]
    assert out[1].source == held and len(out[1].dest) == 2 and used(tables) == 0
    assert tables.admit(cache, TOKENS, 23)
    back = tables.take_moves()
    assert [move.kind for move in back] == ["swap_in", "swap_in_window"]
    assert back[1] == CacheMove("swap_in_window", out[1].dest, cache.windowed.blocks[4:6])
    tables.check_integrity([cache])


def test_shift_moves_a_window_with_its_tokens():
    tables, cache = make_tables(), SequenceCache()
    tables.reserve_for_shift(cache, 16)
    assert not cache.keeps_windows and tables.admit(cache, TOKENS, 32)
    run(tables, cache, 32)
    held = cache.windowed.in_use
    assert tables.shift(cache, 4, 16)
    assert cache.num_tokens == 20 and cache.windowed.num_freed == 3 and cache.windowed.in_use == held
    assert [(move.kind, move.shift) for move in tables.take_moves()] == [("copy", -12), ("copy_window", -12)]


def test_tokens_that_a_shift_keeps_have_blocks_if_a_window_reaches_them():
    tables, cache = make_tables(), SequenceCache()
    tables.reserve_for_shift(cache, 4)
    assert cache.keeps_windows and tables.admit(cache, TOKENS, 12)
    run(tables, cache, 12, chunk=1)
    assert cache.windowed.num_freed == 0 and used(tables) == 3
    assert tables.shift(cache, 4, 8) and len(cache.windowed.in_use) == 2
    tables.check_integrity([cache])


def test_sequences_wait_until_a_window_and_a_chunk_have_room():
    """Blocks for six windows, a chunk, and one block more for each: more sequences wait, and none is preempted."""
    bench = Bench(
        num_blocks=400,
        block_size=SIZE,
        window=6,
        num_window_blocks=3 * 6 + 2,
        max_num_seqs=16,
        max_num_batched_tokens=8,
        chunked_prefill_size=8,
    )
    for _ in range(12):
        bench.add(40, 60)
    most = 0
    while bench.scheduler.has_work:
        bench.launch_all()
        most = max(most, len(bench.scheduler.running))
        bench.update()
    bench.check_end()
    assert most == 6 and bench.scheduler.counts["preemptions"] == 0


def test_stages_go_on_with_answers_while_windows_have_no_room_for_a_prompt():
    """``phases`` puts answers off for prompts that can be admitted, not for one that waits for blocks of windowed layers."""
    bench = Bench(
        num_blocks=400,
        block_size=SIZE,
        num_stages=2,
        window=6,
        num_window_blocks=30,
        batch_policy="phases",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        chunked_prefill_size=64,
    )
    for _ in range(8):
        bench.add(80, 20)
    in_flight = []
    while bench.scheduler.has_work:
        bench.launch_all()
        entries = [entry for batch in bench.scheduler.in_flight for entry in batch.plan.entries]
        if bench.scheduler.waiting and all(entry.is_decode for entry in entries):
            in_flight.append(len(bench.scheduler.in_flight))
        bench.update()
    bench.check_end()
    assert set(in_flight) == {2}
