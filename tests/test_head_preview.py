"""``--head-preview``: greedy answers of the whole head from a part of it."""

from __future__ import annotations

import shutil

import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.native import compiler

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so there is only the reference"
)


def answers(directory: str, **options) -> list:
    """Answers to greedy requests one by one, to a few at a time, some sampled, and at the end to one with probabilities."""
    with LLM(directory, threads=1, dtype="bfloat16", num_kv_blocks=200, autotune="off", **options) as llm:
        greedy = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
        drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=5)
        measured = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, logprobs=2)
        prompts = mixed_prompts()[:3]
        alone = [llm.generate([prompt], greedy)[0] for prompt in prompts]  # these have the preview
        outputs = [*alone, *llm.generate(prompts, [greedy, drawn, greedy]), *llm.generate(prompts[:1], measured)]
    return [(output.completions[0].token_ids, output.completions[0].logprobs) for output in outputs]


@pytest.mark.each_value
@needs_compiler
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-untied"])
def test_tokens_are_those_of_the_whole_head(tmp_path, kind, quantization):
    directory = str(make_checkpoint(tmp_path / "model", kind))
    options = {"quantization": quantization, "functions": "auto"}
    assert answers(directory, head_preview=True, **options) == answers(directory, **options)


@needs_compiler
def test_demo_model_answers_from_a_preview_that_is_kept_on_disk():
    questions = [[{"role": "user", "content": text}] for text in ("What is 17 + 25?", "Sort 5, 3, 9.")]
    for _ in range(2):  # the second start maps what the first has packed
        with LLM(dtype="bfloat16", head_preview=True, threads=1, weights="plain") as llm:
            whole = llm.layout.weight_bytes(llm.place)
            texts = [llm.generate([question], SamplingParams(max_tokens=80))[0].text for question in questions]
        assert texts == ["42", "3, 5, 9"]
    with LLM(dtype="bfloat16", threads=1, weights="plain") as llm:
        assert whole > llm.layout.weight_bytes(llm.place)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "int4"}, "4 bits already"),
        ({"dtype": "float32"}, "not for float32 on cpu"),
        ({"dtype": "float16", "quantization": "int8"}, "not for float16 on cpu"),
    ],
)
def test_preview_that_would_be_of_no_use_is_refused(options, reason):
    with pytest.raises(UserError, match=f"head_preview.*{reason}"):
        LLM(head_preview=True, threads=1, **options)
