"""The same seed gives the same tokens on every layout as on one rank, through preemption, swap, beams, forms and context
shifts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from drafting import draft_with
from layouts import layouts_for

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.engine.sequence import Sequence

SAMPLE, NUM_CASES = 3, 8
FIELDS = [
    {"max_tokens": 14, "ignore_eos": True},
    {"max_tokens": 16, "temperature": 1.1, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2},
    {"max_tokens": 8, "num_beams": 3, "n": 3, "ignore_eos": True},
    {"max_tokens": 70, "temperature": 0.9, "seed": 6, "ignore_eos": True, "max_context_len": 40},
    {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2, "structured_outputs": {"regex": "([a-z]+ )+[0-9]{9}"}},
]
FIXED = {"block_size": 4, "context_shift": True, "keep": 3}


def requests_of(prompts: list[list[int]]) -> list[tuple[list[int], dict]]:
    """Every prompt with two kinds of sampling, the last of them with half of another prompt before it."""
    found = [(prompt[:36], FIELDS[index]) for index, prompt in enumerate(prompts)]
    return found + [(prompts[1][:20] + prompt[:12], FIELDS[index]) for index, prompt in enumerate(reversed(prompts))]


def answers(outputs) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def alone(group, golden):
    """The answers of a process of its own, one request after another; on rank 0."""
    directory, prompts, _ = golden
    if group.rank > 0:
        return None
    program = (
        "import json, msgspec, sys; from labinfer import LLM, SamplingParams\n"
        "options, requests = json.load(sys.stdin)\n"
        "llm = LLM(**options)\n"
        "answers = [llm.generate([p], msgspec.convert(f, SamplingParams))[0].completions for p, f in requests]\n"
        "print(json.dumps([[c.token_ids for c in found] for found in answers]))\n"
    )
    options = {"model": str(directory), "threads": 1, "num_kv_blocks": 400, "enable_prefix_caching": False} | FIXED
    # Without the launcher's variables it is a world of its own.
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH") if key in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([options, requests_of(prompts)]),
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass
class AnswerProposer:
    """Drafts what the answers are known to be, every fifth token wrong."""

    answers: list[list[list[int]]]
    draw: random.Random

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return list(map(self._propose, sequences, limits))

    def forget(self, sequences: list[Sequence]) -> None:
        pass

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        answer, begin = self.answers[sequence.request.key][sequence.choice], sequence.num_output_tokens
        right = answer[begin : begin + self.draw.randint(1, min(limit, 6))]
        return [token if self.draw.random() < 0.8 else 3 for token in right]


def draw_options(draw: random.Random) -> dict:
    swap = draw.random() < 0.5
    return {
        "num_kv_blocks": draw.choice([30, 36, 300]),  # three beams of 44 tokens take 33
        "max_num_batched_tokens": draw.randint(4, 60),
        "chunked_prefill_size": draw.randint(1, 60),
        "max_num_seqs": draw.randint(3, 12),
        "enable_prefix_caching": draw.random() < 0.6,
        "preemption_mode": "swap" if swap else "recompute",
        "swap_space": 0.0005 if swap else 0.0,
        "batch_policy": draw.choice(["auto", "greedy", "phases"]),
        "pipeline_schedule": draw.choice(["1f1b", "1f1b", "gpipe", "lockstep"]),
        "max_inflight": draw.choice([0, 0, 1, 3]),
    }


@pytest.mark.parametrize(
    "case", [*range(SAMPLE), *(pytest.param(case, marks=pytest.mark.slow) for case in range(SAMPLE, NUM_CASES))]
)
def test_same_seed_gives_the_same_tokens_on_every_layout(group, golden, alone, case):
    directory, prompts, _ = golden
    draw = random.Random(case)  # the same on every rank
    preemptions = []
    for layout in layouts_for(group.size):
        options = draw_options(draw)
        flat = {"model": str(directory), **FIXED, **layout, **options}
        requests = requests_of(prompts)
        order = draw.sample(range(len(requests)), len(requests))
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        if llm.is_rank0 and case % 2:
            draft_with(llm, AnswerProposer([alone[index] for index in order], random.Random(case)))
        chosen = [requests[index] for index in order]
        outputs = llm.generate(
            [prompt for prompt, _ in chosen], [msgspec.convert(fields, SamplingParams) for _, fields in chosen]
        )
        if llm.is_rank0:
            assert answers(outputs) == [alone[index] for index in order], (layout, options)
            if options["num_kv_blocks"] < 300 and options["max_num_seqs"] > 6:
                preemptions.append(llm.report.counts["preemptions"])
            if case % 2 and options["chunked_prefill_size"] > 1:
                assert llm.report.counts["drafted"] > llm.report.counts["accepted"] > 0, options
    assert not preemptions or any(preemptions), "nobody was ever short of blocks"  # drafts may end answers in time
