"""examples/plugins/lfu_eviction.py: a prompt that is used often survives a flood of one-off prompts, in every prefix cache."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from golden import golden
from launchers import LAUNCH, ROOT, run
from scheduler_bench import Bench

from labinfer import LLM, SamplingParams
from labinfer.engine.block_manager import BlockManager

PLUGIN = str(ROOT / "examples/plugins/lfu_eviction.py")
POLICIES = ("lru", "lfu")
CACHES = {
    "KV blocks": {"num_blocks": 16},
    "windowed blocks": {"num_blocks": 200, "window": 8, "num_window_blocks": 16, "chunked_prefill_size": 4},
    "snapshots of states": {"num_blocks": 200, "num_states": 6, "snapshot_interval": 8},
}
"""Caches of which only the named one is too small for all prompts."""


@pytest.fixture(autouse=True)
def loaded(load_example):
    load_example("lfu_eviction")


@pytest.mark.parametrize("cache", CACHES)
def test_popular_prompt_survives_a_flood_of_others(cache):
    found = {}
    for policy in POLICIES:
        bench = Bench(prefix_cache_eviction=policy, **CACHES[cache])
        for shared in (*[21] * 3, *[0] * 12, 21):
            last = bench.add(21, 2, shared=shared)
            bench.finish_all()
        found[policy] = last.num_cached_tokens
    assert found == {"lru": 0, "lfu": 20}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_steps", [300, pytest.param(5_000, marks=pytest.mark.slow)])
def test_nothing_is_lost_in_many_steps(cache, num_steps):
    """``Bench`` checks all blocks after every step, ``BlockManager`` each block that is evicted."""
    bench, draw = Bench(prefix_cache_eviction="lfu", **CACHES[cache]), random.Random(num_steps)
    for _ in range(num_steps):
        bench.step_at_random(draw)
    bench.finish_all()
    assert bench.scheduler.counts["found"] > num_steps / 10


POPULAR, FLOOD = [*range(3, 60)], [[number] * 57 for number in range(3, 15)]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@contextmanager
def flooded(policy: str, **options) -> Iterator[LLM]:
    """A model that has answered a popular prompt three times, and then many others."""
    with LLM(prefix_cache_eviction=policy, dtype="float32", block_size=4, threads=1, **options) as llm:
        for prompt in (*[POPULAR] * 3, *FLOOD):
            llm.generate([prompt], PARAMS)
        yield llm


def test_snapshots_of_a_hybrid_model_follow():
    outputs = {}
    for policy in POLICIES:
        with flooded(policy, model=str(golden("qwen3.5").directory), max_num_seqs=2, num_kv_blocks=400) as llm:
            [outputs[policy]] = llm.generate([POPULAR], PARAMS)
    assert {policy: output.num_cached_tokens for policy, output in outputs.items()} == {"lru": 0, "lfu": 56}
    assert outputs["lru"].completions[0].token_ids == outputs["lfu"].completions[0].token_ids


def test_cache_of_a_draft_model_follows():
    drafts = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 2}
    digests: list[bytes] = []
    BlockManager(0, 4).extend_chain(digests, POPULAR, "", 14)
    found = {}
    for policy in POLICIES:
        with flooded(policy, num_kv_blocks=40, speculative_config=drafts) as llm:
            found[policy] = len(llm.engine.scheduler.drafts.proposer.tables.blocks.find(digests))
    assert found == {"lru": 0, "lfu": 14}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, ("-tp", "2"), marks=pytest.mark.slow),
        (2, ("-pp", "2")),
    ],
)
def test_job_finds_the_popular_prompt_again_on_every_layout(ranks, layout, tmp_path):
    given, answers = tmp_path / "in.jsonl", {}
    bodies = [{"prompt": ids, "max_tokens": 4, "ignore_eos": True} for ids in (*[POPULAR] * 3, *FLOOD, POPULAR)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--max-num-seqs", "1", "--block-size", "4", "--num-kv-blocks", "40", "--dtype", "float32", *layout)
    for policy in POLICIES:
        output = tmp_path / f"{policy}.jsonl"
        job = ("--input", given, "--output", output, "--plugin", PLUGIN, "--prefix-cache-eviction", policy, *flags)
        done = run("torchrun" if ranks > 1 else "single", ranks, LAUNCH, *job)
        assert done.returncode == 0, done.text
        answers[policy] = [json.loads(line)["response"]["body"] for line in output.read_text().splitlines()]
    found = {policy: last["usage"]["prompt_tokens_details"]["cached_tokens"] for policy, (*_, last) in answers.items()}
    assert found == {"lru": 0, "lfu": 56}
    texts = [[answer["choices"] for answer in answers[policy]] for policy in POLICIES]
    assert texts[0] == texts[1]
