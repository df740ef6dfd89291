"""Blocks found by what they hold: who shares them, when they are forgotten, and how many tokens are not run again."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.eviction import LRU
from labinfer.engine.request import FinishReason, Request


def chain(tokens: list[int], salt: str = "", block_size: int = 4) -> list[bytes]:
    digests: list[bytes] = []
    BlockManager(0, block_size).extend_chain(digests, tokens, salt, len(tokens) // block_size)
    return digests


def filled(blocks: BlockManager, digests: list[bytes]) -> list[int]:
    held = blocks.allocate(len(digests))
    for block, digest in zip(held, digests, strict=True):
        blocks.register(block, digest)
    return held


def test_digest_stands_for_the_whole_prefix():
    a, b = chain(list(range(12))), chain([0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11])
    assert a[0] == b[0] and a[1] != b[1] and a[2] != b[2]
    assert not set(chain(list(range(12)), "mine")) & set(a)
    assert chain(list(range(12)), "s" * 64) != chain(list(range(12)), "s" * 65)


def test_chain_grows_as_tokens_come():
    blocks, tokens, digests = BlockManager(0, 4), list(range(16)), []
    for count in range(5):
        blocks.extend_chain(digests, tokens, "", count)
    assert digests == chain(tokens)


def test_shared_blocks_are_free_when_their_last_holder_is_gone():
    blocks = BlockManager(4, 4)
    held = filled(blocks, chain(list(range(8))))
    assert blocks.acquire(held, 0) == held
    blocks.free(held)
    assert blocks.num_free == 2 and blocks.find(chain(list(range(12)))) == held
    blocks.free(held)
    blocks.check_integrity()
    assert blocks.num_free == 4
    assert blocks.find(chain(list(range(12)))) == held  # free, but still known
    with pytest.raises(KeyError):
        blocks.free(held)


def test_least_recently_used_block_is_forgotten_first_and_a_prefix_after_what_follows_it():
    blocks = BlockManager(4, 4)
    old, young = chain([1] * 8), chain([2] * 8)
    blocks.free(filled(blocks, old))
    blocks.free(filled(blocks, young))
    blocks.allocate(1)
    assert len(blocks.find(old)) == 1 and len(blocks.find(young)) == 2
    blocks.free(blocks.acquire(blocks.find(old), 0))  # now the most recently used
    blocks.allocate(2)
    blocks.check_integrity()
    assert len(blocks.find(old)) == 1 and blocks.find(young) == []


def test_blocks_with_nothing_to_find_are_taken_first():
    blocks = BlockManager(4, 4)
    known = filled(blocks, chain([1] * 8))
    blocks.free(known)
    assert not set(blocks.allocate(2)) & set(known)
    assert blocks.find(chain([1] * 8)) == known


def test_first_of_two_equal_blocks_is_the_known_one():
    blocks = BlockManager(4, 4)
    first, second = filled(blocks, chain([1] * 4)), filled(blocks, chain([1] * 4))
    assert blocks.find(chain([1] * 4)) == first
    blocks.free(second)
    blocks.free(first)
    blocks.check_integrity()
    assert blocks.find(chain([1] * 4)) == first


def test_found_blocks_are_shared_with_room_behind_them_or_not_at_all():
    blocks = BlockManager(4, 4)
    held = filled(blocks, chain([1] * 8))
    blocks.free(held)
    assert blocks.acquire(held, 3) is None  # the two found ones are among the four that are free
    assert blocks.num_free == 4
    both = blocks.acquire(held, 2)
    assert both[:2] == held and sorted(both) == [0, 1, 2, 3]
    blocks.free(both)
    blocks.check_integrity()


class Recorded(LRU):
    """Keeps the calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def add(self, blocks):
        self.calls.append(("add", list(blocks)))
        super().add(blocks)

    def use(self, blocks):
        self.calls.append(("use", list(blocks)))
        super().use(blocks)

    def forget(self, block):
        self.calls.append(("forget", block))


def test_eviction_is_told_of_cached_blocks_only():
    blocks = BlockManager(8, 4, eviction=Recorded)
    calls = blocks._eviction.calls
    held = filled(blocks, chain([1] * 8))
    begun = blocks.allocate(1)
    blocks.fork(held + begun)  # a second beam is no cache hit
    blocks.free(held + begun)
    assert calls == []
    blocks.free(held + begun)
    assert calls == [("add", [held[1], held[0]])]  # the prefix comes last
    assert blocks.acquire(blocks.find(chain([1] * 8)), 1)[:2] == held
    blocks.unregister(held[1])
    assert calls[1:] == [("use", held), ("forget", held[1])]
    blocks.free(held)
    assert calls[3:] == [("add", [held[0]])] and blocks.evictable == {held[0]}


@pytest.mark.parametrize("number", [0, 3, 99, None])
def test_eviction_that_breaks_its_contract_is_named(number):
    class Careless(LRU):
        def evict(self):
            return number

    blocks = BlockManager(4, 4, eviction=Careless)
    filled(blocks, chain([1] * 4))  # block 0, in use and cached
    blocks.free(filled(blocks, chain([2] * 8)))
    blocks.allocate(1)  # block 3
    with pytest.raises(AssertionError, match=r"Careless.evict\(\) gave block .*, which is not evictable"):
        blocks.allocate(1)


# Through the scheduler. Blocks hold 4 tokens.


def test_second_request_runs_only_what_differs():
    bench = Bench()
    bench.add(40, 3, shared=32)
    bench.finish_all()
    second = bench.add(40, 3, shared=32)
    assert bench.launch().num_tokens == 8
    bench.finish_all()
    assert second.num_cached_tokens == 32
    assert (bench.scheduler.counts["found"], bench.scheduler.counts["looked_up"]) == (32, 80)


def test_last_token_is_always_run():
    bench = Bench()
    for _ in range(2):
        bench.add(16, 1, shared=16)
        bench.finish_all()
    assert bench.sequences[1].num_cached_tokens == 12


def test_requests_of_one_step_share_what_the_first_is_about_to_write():
    bench = Bench(max_num_batched_tokens=64)
    for _ in range(4):
        bench.add(18, 2, shared=16)
    plan = bench.launch()
    assert [entry.num_tokens for entry in plan.entries] == [18, 2, 2, 2]
    used = bench.blocks.num_blocks - bench.blocks.num_free
    assert used == 4 + 4
    bench.finish_all()


def test_shared_prompt_is_run_once_although_all_its_requests_come_at_once():
    bench = Bench(num_blocks=512, max_num_batched_tokens=256, chunked_prefill_size=256, num_stages=2)
    for _ in range(16):
        bench.add(1008, 2, shared=1000)
    bench.finish_all()
    assert bench.scheduler.counts["found"] == 15 * 1000


def test_what_was_generated_is_found_in_the_next_turn():
    bench = Bench()
    first = bench.add(6, 9)
    bench.finish_all()
    bench.add_request(
        Request(key=1, prompt_token_ids=[*first.token_ids, 5, 5, 5], sampling=SamplingParams(max_tokens=2))
    )
    second = bench.sequences[1]
    bench.launch()
    assert second.num_cached_tokens == 12  # the last sampled token was never run
    bench.scheduler.finish(second, FinishReason.ABORT)


def test_different_salts_share_nothing():
    bench = Bench()
    for salt in ("", "a", "b", "a"):
        bench.add(17, 1, shared=17, cache_salt=salt)
        bench.finish_all()
    assert [sequence.num_cached_tokens for sequence in bench.sequences] == [0, 0, 0, 16]


def test_preempted_sequence_finds_what_is_left_of_its_own_blocks():
    bench = Bench(num_blocks=6, block_size=4)
    bench.add(7, 9)
    young = bench.add(7, 9)
    other = bench.add(7, 9)
    bench.finish_all()
    assert young.num_preemptions + other.num_preemptions > 0
    assert bench.scheduler.counts["found"] > 0
    assert [sequence.num_cached_tokens for sequence in bench.sequences] == [0, 0, 0]


def test_prefix_caching_can_be_turned_off():
    bench = Bench()
    bench.blocks.prefix_caching = False
    for _ in range(2):
        bench.add(16, 1, shared=16)
        bench.finish_all()
    assert bench.scheduler.counts["found"] == 0


@pytest.mark.each_value
@pytest.mark.parametrize(("chunk", "batch"), [(512, 512), (512, 2048), (128, 512), (64, 512)])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_those_who_run_side_by_side_share_what_each_computes(chunk, batch, num_stages):
    """16 requests with 1,000 tokens in common, however they are cut into chunks."""
    bench = Bench(
        num_blocks=2000,
        block_size=16,
        num_stages=num_stages,
        chunked_prefill_size=chunk,
        max_num_batched_tokens=batch,
        batch_policy="balanced",
    )
    for _ in range(16):
        bench.add(1024, 4, shared=1000)
    bench.finish_all()
    assert bench.scheduler.counts["found"] >= 0.9 * 16 * 1000
    assert sum(s.num_cached_tokens for s in bench.sequences) == bench.scheduler.counts["found"]
