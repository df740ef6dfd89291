"""``--weights``: bfloat16 in 12 bits gives the tokens and probabilities of bfloat16 as it is."""

from __future__ import annotations

import shutil

import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.native import compiler

PARAMS = SamplingParams(max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True)


def answers(directory: str, weights: str, **options) -> tuple[list, int]:
    """Tokens with their probabilities, and the bytes of the weights."""
    with LLM(directory, num_kv_blocks=200, threads=1, dtype="bfloat16", weights=weights, **options) as llm:
        outputs = llm.generate(mixed_prompts(), PARAMS)
        size = llm.layout.weight_bytes(llm.place)
    return [(output.completions, output.prompt_logprobs) for output in outputs], size


@pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so there is only the reference"
)
@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-untied"])
def test_12_bits_give_the_same_answers_from_three_quarters_of_the_bytes(tmp_path, kind):
    directory = str(make_checkpoint(tmp_path / "model", kind))
    expected, plain_bytes = answers(directory, "plain", autotune=False)
    for weights in ("packed12", "auto"):
        found, packed_bytes = answers(directory, weights, autotune=False)
        assert found == expected
        assert 0.75 < packed_bytes / plain_bytes < 0.85, weights  # norms, biases and odd rows are not packed


def test_the_reference_holds_12_bits_too(tmp_path):
    directory = str(make_checkpoint(tmp_path / "model", "qwen2-tied"))
    expected, plain_bytes = answers(directory, "plain", functions="linear=reference")
    found, packed_bytes = answers(directory, "packed12", functions="linear=reference-packed12")
    assert [each[0].token_ids for each, _ in found] == [each[0].token_ids for each, _ in expected]
    assert packed_bytes < 0.85 * plain_bytes
