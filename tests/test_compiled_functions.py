"""Compiled and torch's functions through ``LLM``: a bfloat16 model says nearly the same, and answers as well."""

from __future__ import annotations

import shutil
import statistics

import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.native import compiler

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)
PARAMS = SamplingParams(max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2-tied", "bfloat16"),
        ("llama-untied", "bfloat16"),
        ("llama-tied-biased", "bfloat16"),
        ("qwen2-windows", "bfloat16"),
        ("qwen2-tied", "float16"),
        ("llama-tied-biased", "float16"),
    ],
)
def test_log_probabilities_are_as_near_to_float32s_as_torchs(tmp_path, kind, dtype):
    """Of every prompt token; the largest and the mean error may be a little larger, as both scatter."""
    directory = str(make_checkpoint(tmp_path / "model", kind))
    found = {}
    for name, options in {
        "exact": {"dtype": "float32"},
        "reference": {"dtype": dtype, "functions": "reference"},
        "auto": {"dtype": dtype, "autotune": False},
    }.items():
        with LLM(directory, num_kv_blocks=200, threads=1, **options) as llm:
            outputs = llm.generate(mixed_prompts(), PARAMS)
        found[name] = [one.logprob for output in outputs for one in output.prompt_logprobs]
    errors = {
        name: [abs(a - b) for a, b in zip(found[name], found["exact"], strict=True)] for name in ("reference", "auto")
    }
    assert errors["auto"] != errors["reference"]  # they were really in use
    assert statistics.fmean(errors["auto"]) <= 1.1 * statistics.fmean(errors["reference"])
    assert max(errors["auto"]) <= 1.5 * max(errors["reference"])


def test_demo_model_answers_the_same():
    questions = ["What is 17 + 25?", "Sort 5, 3, 9.", "法国的首都是哪里？", "Count from 1 to 9.", "从1数到20。"]
    chats = [[{"role": "user", "content": text}] for text in questions]
    texts = []
    for functions in ("reference", "auto"):
        with LLM(functions=functions, autotune=False, threads=1) as llm:
            texts.append([output.text for output in llm.generate(chats, SamplingParams(max_tokens=80))])
    assert texts[0] == texts[1]
    assert texts[0][:2] == ["42", "3, 5, 9"]


def test_float32_model_draws_the_same_tokens(tmp_path):
    directory = str(make_checkpoint(tmp_path / "model", "qwen2-tied"))
    settings = [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 90, "top_p": 0.9, "typical_p": 0.9}]
    params = [
        SamplingParams(max_tokens=12, temperature=1.2, seed=n, ignore_eos=True, repetition_penalty=1.0 + n % 2, **one)
        for n, one in enumerate(settings)
    ]
    tokens = []
    for functions in ("reference", "auto"):
        with LLM(directory, num_kv_blocks=200, dtype="float32", functions=functions) as llm:
            in_use = llm._parts.worker.runner.sampler._sample
            tokens.append([output.token_ids for output in llm.generate(mixed_prompts(5), params)])
    assert tokens[0] == tokens[1]
    assert type(in_use.__self__).__name__ == "CpuSampling"


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-untied", "qwen2-windows"])
def test_float32_model_gives_the_same_bits_whatever_is_computed_together(tmp_path, kind):
    """Log-probabilities of every token alone on one thread, beside others, in chunks, and on several threads."""
    directory, prompts = str(make_checkpoint(tmp_path / "model", kind)), mixed_prompts(7)

    def numbers(batches: list[list[list[int]]], **options) -> list[list[float]]:
        with LLM(directory, num_kv_blocks=400, dtype="float32", enable_prefix_caching=False, **options) as llm:
            outputs = [output for batch in batches for output in llm.generate(batch, PARAMS)]
        return [
            [token.logprob for token in output.prompt_logprobs]
            + [token.logprob for token in output.completions[0].logprobs]
            for output in outputs
        ]

    alone = numbers([[prompt] for prompt in prompts], threads=1)
    assert numbers([prompts], threads=1) == alone
    assert numbers([prompts], threads=3, chunked_prefill_size=7, max_num_batched_tokens=16) == alone
