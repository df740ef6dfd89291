"""A draft model through ``LLM`` in one process: the answers are those without it, and the same noise makes drafts come true."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM

import labinfer
from labinfer import LLM, SamplingParams, StructuredOutputs
from labinfer.base.errors import UserError
from labinfer.base.plan import BatchPlan, BatchResult
from labinfer.engine.draft_model import DraftModelProposer
from labinfer.engine.sequence import Sequence

ASSETS = Path(labinfer.__file__).parent / "assets"
OPTIONS = {"model": "demo", "dtype": "float32", "threads": 1}
DRAFTED = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4}
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=3),
    SamplingParams(max_tokens=20, temperature=0.8, seed=4, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=20, temperature=0.8, seed=5, n=2, ignore_eos=True),
    SamplingParams(max_tokens=24, structured_outputs=StructuredOutputs(regex="([a-z]+ ){4,}!")),
    SamplingParams(
        max_tokens=24, temperature=0.8, seed=6, structured_outputs=StructuredOutputs(json='{"type": "object"}')
    ),
]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    lines = (ASSETS / "held-out" / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in random.Random(0).sample(lines, len(PARAMS))]


def conversations(prompts: list[str]) -> list[list[dict]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def tokens_of(outputs) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def plain(prompts) -> list[list[list[int]]]:
    with LLM(num_kv_blocks=400, **OPTIONS) as llm:
        return tokens_of(llm.chat(conversations(prompts), PARAMS))


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 400},
        {"num_kv_blocks": 30, "block_size": 4, "enable_prefix_caching": False, "chunked_prefill_size": 5},
        {"num_kv_blocks": 400, "max_num_batched_tokens": 12, "max_model_len": 60},
    ],
    ids=["ample", "preempted", "small steps"],
)
def test_answers_are_those_without_a_draft_model(prompts, plain, options):
    with LLM(speculative_config=DRAFTED, **OPTIONS, **options) as llm:
        proposer = llm.engine.scheduler.drafts.proposer
        for _ in range(2):  # the second run finds blocks of the first, the draft model's too
            assert tokens_of(llm.chat(conversations(prompts), PARAMS)) == plain
            counts = llm.report.counts
            assert counts["drafted"] > 40 and counts["accepted"] > 10
            assert counts["preemptions"] > 0 or options["num_kv_blocks"] > 30
            assert proposer.tables.is_idle


@dataclass
class Recorded:
    """A proposer that keeps where it drafted."""

    proposer: DraftModelProposer
    prefixes: list[list[int]] = field(default_factory=list)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        drafts = self.proposer.propose(sequences, [1] * len(limits))
        self.prefixes += [list(sequence.token_ids) for sequence, draft in zip(sequences, drafts, strict=True) if draft]
        return drafts

    def forget(self, sequences: list[Sequence]) -> None:
        self.proposer.forget(sequences)


def with_other_noise(run):
    """The draft model, drawing with another seed than the sequences'."""

    def run_otherwise(plan: BatchPlan) -> BatchResult:
        starts = [
            msgspec.structs.replace(
                start, sampling=msgspec.structs.replace(start.sampling, seed=start.sampling.seed + 999)
            )
            for start in plan.starts
        ]
        return run(msgspec.structs.replace(plan, starts=starts))

    return run_otherwise


def distances(prefixes: list[list[int]], temperature: float) -> torch.Tensor:
    """Total variation distance of what the two models predict behind each prefix, by Transformers."""
    models = [
        AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32) for name in ("demo", "demo-draft")
    ]
    found = []
    with torch.inference_mode():
        for prefix in prefixes:
            p_V, q_V = ((model(torch.tensor([prefix])).logits[0, -1] / temperature).softmax(-1) for model in models)
            found.append((p_V - q_V).abs().sum() / 2)
    return torch.stack(found)


def test_same_noise_makes_more_drafts_right_than_the_bound_says(prompts):
    """Pr[same] >= (1 - D) / (1 + D) at every place (arXiv:2408.07978), D the total variation distance there."""
    temperature = 3.0  # at which the demo's predictions are spread: it hardly doubts at 1
    requests = conversations(prompts) * 8
    params = [
        SamplingParams(max_tokens=16, temperature=temperature, seed=100 + seed, ignore_eos=True)
        for seed in range(len(requests))
    ]
    rates, prefixes = {}, []
    with LLM(num_kv_blocks=400, speculative_config=DRAFTED, **OPTIONS) as llm:
        drafts, model = llm.engine.scheduler.drafts, llm.draft_model
        run = model.run
        for noise in ("same", "other"):
            drafts.proposer = recorded = Recorded(llm.engine.scheduler.drafts.proposer)
            if noise == "other":
                model.run = with_other_noise(run)
            llm.chat(requests, params)
            counts = llm.report.counts
            rates[noise] = counts["accepted"] / counts["drafted"]
            if noise == "same":
                prefixes = recorded.prefixes
                assert len(prefixes) >= counts["drafted"] > 300
            drafts.proposer = recorded.proposer
    distance = distances(prefixes[::3], temperature)
    bound = float(((1 - distance) / (1 + distance)).mean())
    spread = 3 * (0.25 / len(prefixes)) ** 0.5
    print(
        f"same noise {rates['same']:.3f}, other noise {rates['other']:.3f}, mean distance {float(distance.mean()):.3f}, "
        f"bound {bound:.3f}, {len(prefixes)} drafts"
    )
    assert rates["same"] > bound - spread
    assert rates["same"] > 2 * rates["other"] + spread


def test_draft_model_with_another_vocabulary_is_refused(tmp_path):
    directory = make_checkpoint(tmp_path / "other", "qwen2-tied")
    with pytest.raises(UserError, match="has a vocabulary of 512 tokens, the model one of 3072"):
        LLM(num_kv_blocks=40, speculative_config={"model": str(directory)}, **OPTIONS)


def test_draft_model_that_is_nowhere_is_refused():
    with pytest.raises(UserError, match="the draft model of .*no-such-model was not found"):
        LLM(num_kv_blocks=40, speculative_config={"model": "./no-such-model"}, **OPTIONS)
