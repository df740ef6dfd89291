"""Layers that keep a state for each sequence, and one whose tokens leave something of another shape, on every layout:
the same tokens as on one rank, through prefix hits, preemption by swap and recompute, beams and context shifts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import toy_family
from checkpoints import mixed_prompts
from layouts import layouts_for

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.environment import detect

HYBRID = ["decay", "latent", "attention", "decay"]
PAGED = ["latent", "attention", "latent", "attention"]
TESTS = Path(__file__).parents[1]
GREEDY = {"max_tokens": 24, "ignore_eos": True}
SAMPLED = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.2, "seed": 5, "repetition_penalty": 1.1}
BEAMS = {"max_tokens": 8, "ignore_eos": True, "num_beams": 2, "n": 2}
PROGRAM = """
import json, sys
import toy_family  # registers the family
from labinfer import LLM, SamplingParams
found = []
for options, prompts, fields in json.load(sys.stdin):
    llm, answers = LLM(**options), []
    for prompt, sampling in zip(prompts, fields):
        (output,) = llm.generate([prompt], SamplingParams(**sampling))
        answers.append([completion.token_ids for completion in output.completions])
        if sampling.get("temperature") is None and "num_beams" not in sampling and not options.get("context_shift"):
            for count in (1, 7, 20):  # what came token by token is what a prompt of these tokens gives
                (again,) = llm.generate([prompt + answers[-1][0][:count]], SamplingParams(max_tokens=1, ignore_eos=True))
                assert again.completions[0].token_ids == answers[-1][0][count : count + 1], (len(prompt), count)
    found.append(answers)
print(json.dumps(found))
"""


SHIFTED = {"context_shift": True, "keep": 3, "max_model_len": 40, "block_size": 4}
LONG = {"max_tokens": 60, "ignore_eos": True}


def alone(*jobs: tuple[Path, list[list[int]], list[dict], dict]) -> list[list[list[list[int]]]]:
    """The answers of a process of its own to jobs (checkpoint, prompts, sampling, options), one request after another, each
    prompt in one chunk."""
    given = {"threads": 1, "num_kv_blocks": 400, "enable_prefix_caching": False}
    inputs = [({"model": str(directory)} | given | options, *asked) for directory, *asked, options in jobs]
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(inputs),
        env=environment | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def checkpoints(group):
    """By name, made on rank 0 and seen by all ranks of this machine."""
    path = tempfile.mkdtemp(prefix="labinfer-toy-") if group.rank == 0 else ""
    root = Path(group.comm.all_gather_bytes(path.encode())[0].decode())
    if group.rank == 0:
        toy_family.write_toy(root / "hybrid", HYBRID)
        toy_family.write_toy(root / "paged", PAGED)
    group.comm.barrier()
    yield {"hybrid": root / "hybrid", "paged": root / "paged"}
    group.comm.barrier()
    if group.rank == 0:
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def questions() -> tuple[list[list[int]], list[dict]]:
    """Prompts, two of which begin as another one does, and how each is answered."""
    first = mixed_prompts(6)
    prompts = [*first, first[1][:60] + first[2], first[1][:60] + first[4]]
    return prompts, [GREEDY, SAMPLED, GREEDY, GREEDY, BEAMS, SAMPLED, GREEDY, SAMPLED]


@pytest.fixture(scope="module")
def short_prompts(questions) -> list[list[int]]:
    return [prompt[:20] for prompt in questions[0]]


@pytest.fixture(scope="module")
def expected(group, checkpoints, questions, short_prompts):
    """By checkpoint, and those of contexts that shift, on rank 0."""
    if group.rank > 0:
        return None
    jobs = {name: (directory, *questions, {}) for name, directory in checkpoints.items()}
    jobs["shifted"] = checkpoints["paged"], short_prompts, [LONG] * len(short_prompts), SHIFTED
    return dict(zip(jobs, alone(*jobs.values()), strict=True))


def layouts(world_size: int) -> list[dict]:
    """With four ranks both kinds of parallelism at once."""
    if world_size < 4:
        return layouts_for(world_size)
    return [{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}]


def load(group, directory, layout, **options) -> LLM:
    flat = {"model": str(directory), "block_size": 4, "chunked_prefill_size": 7, **layout, **options}
    return LLM.from_options(group, EngineOptions.from_flat(flat))


def answers(llm, prompts, fields):
    return [[c.token_ids for c in output.completions] for output in llm.generate(prompts, fields) or []]


@pytest.mark.each_value
@pytest.mark.parametrize("layout", layouts(detect().world_size), ids=str)
@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param("hybrid", "recompute", marks=pytest.mark.slow), ("hybrid", "swap"), ("paged", "swap")],
)
def test_states_and_other_shapes_give_the_tokens_of_one_rank(
    group, checkpoints, questions, expected, name, mode, layout
):
    prompts, fields = questions[0], [SamplingParams(**sampling) for sampling in questions[1]]
    swap = {"preemption_mode": mode, "swap_space": 0.0005 if mode == "swap" else 0.0}
    for room in (48, 300):  # too little for all, then enough that prompts are still known the second time
        llm = load(group, checkpoints[name], layout, num_kv_blocks=room, max_num_seqs=6, **swap)
        for is_second in (False, True)[: 1 + (room == 300)]:
            found = answers(llm, prompts, fields)
            if not llm.is_rank0:
                continue
            counts = llm.report.counts
            assert found == expected[name], room
            if room == 48:
                assert counts["preemptions"] > 0 and (counts["swaps"] > 0) == (mode == "swap")
            elif is_second:
                assert counts["found"] > 0.5 * counts["looked_up"]


def test_int8_entries_are_rounded_one_token_at_a_time(group, checkpoints, questions):
    """So that neither chunks nor the layout change a token."""
    prompts, fields = questions[0], [SamplingParams(**GREEDY)] * len(questions[0])
    for layout in layouts(group.size):
        given = {"kv_cache_dtype": "int8", "num_kv_blocks": 300}
        found = [
            answers(load(group, checkpoints["paged"], layout, chunked_prefill_size=chunk, **given), prompts, fields)
            for chunk in (5, 64)
        ]
        assert found[0] == found[1]


def test_contexts_shift_by_turning_the_rotated_part(group, checkpoints, short_prompts, expected):
    for layout in layouts(group.size):
        llm = load(group, checkpoints["paged"], layout, num_kv_blocks=64, **SHIFTED)
        found = answers(llm, short_prompts, [SamplingParams(**LONG)] * len(short_prompts))
        assert not llm.is_rank0 or found == expected["shifted"], layout


def test_context_shift_is_refused_where_layers_keep_states(group, checkpoints):
    with pytest.raises(UserError, match="--context-shift is not supported for this model"):
        load(
            group, checkpoints["hybrid"], layouts(group.size)[0], context_shift=True, max_model_len=64, num_kv_blocks=64
        )
