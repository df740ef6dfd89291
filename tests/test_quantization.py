"""``--quantization`` through ``LLM``."""

from __future__ import annotations

import shutil
import statistics

import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.native import compiler

PARAMS = SamplingParams(max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True)


def logprobs(directory: str, **options) -> list[float]:
    with LLM(directory, num_kv_blocks=200, threads=1, **options) as llm:
        outputs = llm.generate(mixed_prompts(), PARAMS)
    return [one.logprob for output in outputs for one in output.prompt_logprobs]


def mean_error(a: list[float], b: list[float]) -> float:
    return statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.each_value
@pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so there is only the reference"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-untied", "llama-tied-biased"])
def test_compiled_and_plain_functions_are_as_near_to_the_unrounded_model(tmp_path, kind, dtype):
    """Random models magnify every error, so only means over many tokens can be compared."""
    directory = str(make_checkpoint(tmp_path / "model", kind))
    exact = logprobs(directory, dtype="float32")
    errors = {}
    for quantization in ("int8", "int4"):
        for functions in ("auto", "reference"):
            found = logprobs(directory, dtype=dtype, quantization=quantization, functions=functions)
            errors[quantization, functions] = mean_error(found, exact)
        if quantization == "int8":  # with scales of few bits, as int4's are, sums of so few inputs are exact in both
            assert errors["int8", "auto"] != errors["int8", "reference"]  # they were really in use
        assert errors[quantization, "auto"] == pytest.approx(errors[quantization, "reference"], rel=0.1)
    assert 0 < errors["int8", "auto"] < errors["int4", "auto"] / 5


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_demo_model_still_answers(quantization):
    questions = ["What is 17 + 25?", "Sort 5, 3, 9."]
    with LLM(quantization=quantization, threads=1) as llm:
        chats = [[{"role": "user", "content": text}] for text in questions]
        texts = [output.text for output in llm.generate(chats, SamplingParams(max_tokens=80))]
    assert texts == ["42", "3, 5, 9"]
