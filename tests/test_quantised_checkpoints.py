"""Quantised checkpoints through ``LLM``, against Transformers on the same values."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, mixed_prompts, transformers_logprobs, write_tokenizer
from published_formats import PUBLISHED, write_published
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from labinfer import LLM, SamplingParams

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 160,
    "intermediate_size": 11 * 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "tie_word_embeddings": True,
}
PROMPTS = mixed_prompts(4)
PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
FORMATS = ["gptq-asym", "gptq-act-order", "awq", "w4a16", "w8a8", "fp8"]


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request, tmp_path_factory):
    """(directory, the ``--quantization`` that holds it in codes, Transformers' logprobs with the oracle's values)."""
    directory, twin = write_model(tmp_path_factory.mktemp("quantised"), request.param)
    return directory, "int8" if request.param == "fp8" else "auto", transformers_logprobs(twin, PROMPTS)


def write_model(folder: Path, name: str) -> tuple[Path, Path]:
    """A dense model in this format, and one of the oracle's values."""
    directory, twin = folder / "model", folder / "twin"
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE)).save_pretrained(directory)
    write_tokenizer(directory)
    write_published(directory, twin, PUBLISHED[name])
    return directory, twin


LOOK = """
import sys
from labinfer.cli.main import main

for directory in sys.argv[1:]:
    assert main(["plan", "--model", directory]) == 0
    assert "sympy" not in sys.modules, directory
"""
"""Fails where torch has imported what it computes shapes with: that takes a second of every start."""


def test_plan_computes_nothing(tmp_path):
    directories = [write_model(tmp_path / name, name)[0] for name in FORMATS]
    done = subprocess.run([sys.executable, "-c", LOOK, *directories], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens") >= len(FORMATS)


def run(directory, dtype: str = "float32", **options) -> tuple[list[float], int]:
    """Logprobs of the prompts' tokens, and the bytes of the weights."""
    with LLM(str(directory), dtype=dtype, num_kv_blocks=100, threads=1, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        place = llm.layout.topology.place(0)
        num_bytes = llm.layout.meta(place).weight_bytes
    return [one.logprob for output in outputs for one in output.prompt_logprobs], num_bytes


def relative_error(found: list[float], exact: list[float]) -> float:
    """Mean error, as a part of the exact values' spread."""
    return statistics.fmean(abs(a - b) for a, b in zip(found, exact, strict=True)) / statistics.stdev(exact)


def test_decoded_checkpoint_has_transformers_logprobs(checkpoint):
    directory, _, exact = checkpoint
    got, _ = run(directory, quantization="none")
    assert got == pytest.approx(exact, rel=1e-4, abs=1e-4)


def test_checkpoint_in_codes_differs_by_its_activations_alone(checkpoint):
    directory, quantization, exact = checkpoint
    _, all_bytes = run(directory, quantization="none")
    held, num_bytes = run(directory, quantization=quantization)
    assert relative_error(held, exact) < 0.05
    assert num_bytes < all_bytes


@pytest.fixture(scope="module", params=["gptq-asym", "w4a16", "fp8"])
def mixture(request, tmp_path_factory):
    """The same of a Qwen3-MoE. Its router is in floating point, and nothing in the config says so."""
    directory = tmp_path_factory.mktemp("mixture") / "model"
    twin = directory.parent / "twin"
    torch.manual_seed(3)
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * 128, "norm_topk_prob": True}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE | experts, head_dim=32)).save_pretrained(directory)
    write_tokenizer(directory)
    write_published(directory, twin, PUBLISHED[request.param])
    return directory, "int8" if request.param == "fp8" else "auto", transformers_logprobs(twin, PROMPTS)


def test_decoded_experts_have_transformers_logprobs(mixture):
    directory, _, exact = mixture
    got, _ = run(directory, quantization="none")
    assert got == pytest.approx(exact, rel=1e-4, abs=1e-4)


def test_experts_in_codes_differ_by_their_activations_alone(mixture):
    directory, quantization, exact = mixture
    _, all_bytes = run(directory, quantization="none")
    held, num_bytes = run(directory, quantization=quantization)
    assert relative_error(held, exact) < 0.05
    assert num_bytes < 0.45 * all_bytes
    offloaded, _ = run(directory, quantization=quantization, expert_offload=5e-4)
    assert offloaded == held
    in_16_bits, _ = run(directory, dtype="bfloat16", quantization=quantization)  # whose functions are tuned
    assert relative_error(in_16_bits, exact) < 0.07
