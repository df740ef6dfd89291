"""``--reproducible``: logits and drawn tokens have the same bits alone and in any batch, chunks, caches, and on any threads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
from captured_steps import UNCAPTURED, captured_rows, without_and_with_capture
from checkpoints import FAMILIES, KINDS, make_checkpoint, mixed_prompts
from drafting import draft_with
from mtp_checkpoints import MTP_KINDS, add_mtp
from toy_format import write_toy
from weight_forms import WEIGHT_FORMS

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError

BLOCK = 4
OPTIONS = {"block_size": BLOCK, "num_kv_blocks": 400, "enable_prefix_caching": False, "threads": 1}
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
PROMPTS = [*mixed_prompts(6), *(SHARED + prompt[:9] for prompt in mixed_prompts(3, seed=2))]
REPEATS = [[5, 6, 7, 8] * 6, [9, 4, 9, 4, 9, 4, 9]]
"""Prompts from which n-grams draft."""
LONG = [[(index * (7 + size) + size) % 500 + 3 for index in range(size)] for size in (470, 1, 300, 260, 33, 480)]
"""Prompts of several spans of attention, and of more rows than products take at once."""
LONG_WAYS = {
    "batch": {},
    "alone, 3 threads": {"threads": 3},
    "chunks of 100, 2 threads": {"chunked_prefill_size": 100, "threads": 2},
    "steps of 37 tokens, 3 threads": {"max_num_batched_tokens": 37, "threads": 3},
    "blocks of 16, chunks of 250": {"block_size": 16, "num_kv_blocks": 200, "chunked_prefill_size": 250, "threads": 3},
}
SMALL = 3 * -(-110 // BLOCK)
"""KV blocks that cannot hold all sequences at once."""
WAYS = {
    "batch": {},
    "chunks of 3, 2 threads": {"chunked_prefill_size": 3, "threads": 2},
    "steps of 7 tokens, 3 threads": {"max_num_batched_tokens": 7, "threads": 3},
    "chunks of 64, 3 sequences": {"chunked_prefill_size": 64, "max_num_seqs": 3},
    "recomputed": {"num_kv_blocks": SMALL, "preemption_mode": "recompute", "max_num_batched_tokens": 64},
    "swapped": {"num_kv_blocks": SMALL, "preemption_mode": "swap", "swap_space": 0.002, "max_num_batched_tokens": 64},
    "prefixes": {"enable_prefix_caching": True},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "drafts": {},
}
COUNTED = {"recomputed": "preemptions", "swapped": "preemptions", "prefixes": "found", "drafts": "accepted"}
"""What a way must have done, among the counts of the run."""
FORMS = WEIGHT_FORMS | {"int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"}}
SAMPLE = [
    ("qwen2-tied", "bfloat16"),
    ("qwen3-next-moe", "float32"),
    ("deepseek-v3-plain", "int4"),
    ("gemma4-layer-inputs", "float16"),
]
CASES = [
    pytest.param(kind, form, marks=() if (kind, form) in SAMPLE else pytest.mark.slow)
    for kind in ("qwen2-windows", *KINDS, *FAMILIES)
    for form in FORMS
]


@dataclass
class AnswerProposer:
    """Drafts three tokens of the known answers, every fourth of them wrong."""

    answers: list[list[int]]

    def propose(self, sequences, limits) -> list[list[int]]:
        return list(map(self._propose, sequences, limits))

    def forget(self, sequences) -> None:
        pass

    def _propose(self, sequence, limit: int) -> list[int]:
        begin = sequence.num_output_tokens
        answer = self.answers[sequence.request.key][begin : begin + min(limit, 3)]
        return [3 if index % 4 == 3 else token for index, token in enumerate(answer, begin)]


def params_of(prompts: list[list[int]], has_prompts: bool) -> list[SamplingParams]:
    """Greedy and drawn answers by turns, with log-probabilities of prompts if asked for."""
    measured = {"logprobs": 0, "prompt_logprobs": 0 if has_prompts else None, "ignore_eos": True}
    return [
        SamplingParams(max_tokens=8 + index, temperature=index % 2 * 0.9, seed=index, **measured)
        for index in range(len(prompts))
    ]


def rows(output) -> list[tuple[int, str]]:
    """Token and bits of its log-probability for each compared row of logits."""
    measured = [*filter(None, output.prompt_logprobs or []), *output.completions[0].logprobs]
    return [(each.token_id, each.logprob.hex()) for each in measured]


def run(
    directory,
    options: dict,
    prompts: list[list[int]] = PROMPTS + REPEATS,
    *,
    alone: bool = False,
    has_prompts: bool = True,
    way: str = "",
    proposer: AnswerProposer | None = None,
) -> list:
    """Rows of each request: alone, or together; twice if they are to find their prefixes."""
    params = params_of(prompts, has_prompts)
    with LLM(str(directory), **OPTIONS | options) as llm:
        if alone:
            return [rows(llm.generate([prompt], each)[0]) for prompt, each in zip(prompts, params, strict=True)]
        if proposer is not None:
            draft_with(llm, proposer)
        for _ in range(2 if way == "prefixes" else 1):
            outputs = llm.generate(prompts, params)
        assert way not in COUNTED or llm.report.counts[COUNTED[way]] > 0, llm.report.counts
        return list(map(rows, outputs))


def num_different(wanted: list, got: list) -> int:
    assert [len(each) for each in wanted] == [len(each) for each in got]
    return sum(a != b for one, other in zip(wanted, got, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_requests_have_the_same_bits_alone_and_in_any_batch(tmp_path, kind, form):
    directory = make_checkpoint(tmp_path / "model", kind)
    options = {"reproducible": True} | FORMS[form]
    exact = {has: run(directory, options, alone=True, has_prompts=has) for has in (True, False)}
    assert sum(map(len, exact[True])) > 300
    answers = AnswerProposer([[token for token, _ in each] for each in exact[False]])
    for name, way in WAYS.items():
        has = name != "prefixes"  # a prompt that is measured finds no prefix
        proposer = answers if name == "drafts" else None
        got = run(directory, options | way, has_prompts=has, way=name, proposer=proposer)
        assert num_different(exact[has], got) == 0, name


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("qwen3", "int8 cache"),
        ("deepseek-v3", "float32"),
        *(
            pytest.param(kind, form, marks=pytest.mark.slow)
            for kind in ("qwen2-tied", "qwen3.5", "gpt-oss", "gemma3")
            for form in FORMS
        ),
    ],
)
def test_long_prompts_have_the_same_bits_alone_and_in_any_batch(tmp_path, kind, form):
    directory = make_checkpoint(tmp_path / "model", kind)
    options = {"reproducible": True, "num_kv_blocks": 600} | FORMS[form]
    exact = run(directory, options, LONG, alone=True)
    for name, way in LONG_WAYS.items():
        got = run(directory, options | way, LONG, alone=name.startswith("alone"))
        assert num_different(exact, got) == 0, name


@pytest.mark.parametrize("noise", [0.3, None], ids=["accepted", "rejected"])
@pytest.mark.parametrize(
    "kind", [MTP_KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in MTP_KINDS[1:])]
)
def test_mtp_drafts_leave_the_bits(tmp_path, kind, noise):
    directory = make_checkpoint(tmp_path / "model", kind)
    add_mtp(directory, kind, noise=noise)
    options = {"reproducible": True, "dtype": "bfloat16"}
    drafted = options | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    assert num_different(run(directory, options, alone=True), run(directory, drafted)) == 0


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(kind, form, marks=() if (kind, form) in SAMPLE else pytest.mark.slow)
        for kind in (*KINDS, *FAMILIES)
        if kind not in UNCAPTURED
        for form in ("float32", "bfloat16", "int4", "float16")
    ],
)
def test_captured_steps_leave_the_bits(tmp_path, kind, form):
    directory = make_checkpoint(tmp_path / "model", kind)
    params = params_of(PROMPTS, False)
    with LLM(str(directory), **OPTIONS | FORMS[form], reproducible=True) as llm:
        runs = [list(map(rows, llm.generate(PROMPTS, params))) for _ in without_and_with_capture(llm)]
        # Experts convert float16 activations in torch, so steps with experts in float16 are not captured.
        has_experts = any(hasattr(layer.mlp, "router") for layer in llm._parts.layout.config.layers)
        assert captured_rows(llm._parts.worker.runner._layers) or (has_experts and form == "float16")
    assert num_different(*runs) == 0


def test_offloaded_experts_are_refused(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen3-moe")
    with pytest.raises(UserError, match="reproducible cuts experts into segments, which cannot be offloaded"):
        LLM(str(directory), reproducible=True, expert_offload=6e-5)


def test_weights_in_12_bits_leave_the_bits(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen2-tied")
    plain, packed = (
        {"reproducible": True, "dtype": "bfloat16", "weights": weights} for weights in ("plain", "packed12")
    )
    assert num_different(run(directory, plain, alone=True), run(directory, packed)) == 0


def test_reference_products_have_other_bits_in_a_batch(tmp_path):
    """The control: what is compared above differs where bits depend on the rows of a product."""
    directory = make_checkpoint(tmp_path / "model", "qwen2-tied")
    options = {"functions": "reference", "autotune": False, "dtype": "float32"}
    assert num_different(run(directory, options, alone=True), run(directory, options)) > 0


@pytest.mark.parametrize(
    "functions", ["reference", "linear=reference", "paged_attention=reference", "sample=reference"]
)
def test_functions_whose_bits_depend_on_the_batch_are_refused(tmp_path, functions):
    directory = make_checkpoint(tmp_path / "model", "qwen2-tied")
    with pytest.raises(UserError, match="reproducible: the bits of .*=reference, of torch, may depend on the batch"):
        LLM(str(directory), **OPTIONS, reproducible=True, functions=functions)


def test_registered_weight_formats_leave_the_bits(tmp_path):
    """A part that this process registers is refused only if it could make the bits depend on the batch."""
    directory = make_checkpoint(tmp_path / "toy", "qwen2-tied")
    write_toy(directory, tmp_path / "plain", ["model.embed_tokens"])
    options = {"reproducible": True, "dtype": "bfloat16"}
    assert num_different(run(tmp_path / "plain", options, alone=True), run(directory, options)) == 0


@pytest.mark.parametrize("num_starts", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_every_start_has_the_same_bits_beside_busy_processes(tmp_path, num_starts):
    directory = make_checkpoint(tmp_path / "model", "qwen3-moe")
    options = {"reproducible": True, "dtype": "bfloat16", "threads": 2}
    exact = run(directory, options, alone=True)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert [num_different(exact, run(directory, options)) for _ in range(num_starts)] == [0] * num_starts
    finally:
        for process in busy:
            process.kill()
            process.wait()
