"""What ``bench accuracy`` measures, in one process, against the same from the parts it is made of."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.base.config import EngineOptions
from labinfer.cli.bench.options import AccuracyOptions
from labinfer.cli.commands.bench_accuracy import VARIANTS, AccuracyBench, Variant, choose_variants
from labinfer.comm.group.rank_group import join_group
from labinfer.comm.spmd.environment import detect
from labinfer.functions.reference.quantized import dequantize, quantize_int4, quantize_int8
from labinfer.text.documents import Document

TEXTS = [prompt for prompt in mixed_prompts() if len(prompt) > 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("accuracy") / "model", "llama-tied-biased")


def bench_of(checkpoint, **given) -> AccuracyBench:
    options = EngineOptions.from_flat({"model": str(checkpoint), "threads": 1})
    group = join_group(detect(), options)
    documents = [Document(text, len(text) - len(text) // 4) for text in TEXTS]
    return AccuracyBench(group, options, AccuracyOptions(per_layer=True, **given), documents)


@pytest.fixture(scope="module")
def bench(checkpoint) -> AccuracyBench:
    return bench_of(checkpoint)


@pytest.fixture(scope="module")
def reports(bench):
    variants = [Variant(("float32",)), *VARIANTS]
    return {variant.name: report for variant, report in bench.measure(variants).items()}


def test_reference_is_no_way_from_itself(reports):
    report = reports["float32"]
    assert report.everything.kl_divergence == 0 and report.everything.same_likeliest == 1
    assert report.everything.perplexity == report.everything.reference_perplexity
    for squares in (*report.inspected.weights.values(), *report.inspected.layers.values()):
        assert squares.error == 0 < squares.size


def test_products_of_all_matrices_are_seen_whatever_the_reference_is(tmp_path, reports):
    """Those with an activation in the same call as well, which an MLP of whole panels has in bfloat16."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama-tied-biased", intermediate_size=256)
    (report,) = bench_of(checkpoint, reference_dtype="bfloat16").measure([Variant(("bfloat16",))]).values()
    assert report.inspected.products.keys() == reports["bfloat16"].inspected.products.keys()
    assert any(name.endswith("gate_up_proj") for name in report.inspected.products)
    assert all(squares.error == 0 for squares in report.inspected.products.values())


@pytest.mark.parametrize(("name", "options"), [("float32", {}), ("float16", {}), ("float32, KV int8", {})])
def test_perplexity_is_what_the_engine_says_of_its_prompts(checkpoint, bench, reports, name, options):
    dtype, _, kv = name.partition(", KV ")
    kv_cache_dtype = kv or "auto"
    if name in reports:
        report = reports[name]
    else:
        (report,) = bench.measure([Variant((dtype,), kv_cache_dtype=kv_cache_dtype)]).values()
    with LLM(str(checkpoint), dtype=dtype, kv_cache_dtype=kv_cache_dtype, threads=1) as llm:
        outputs = llm.generate(TEXTS, SamplingParams(max_tokens=1, prompt_logprobs=0))
    logprobs = [one.logprob for output in outputs for one in output.prompt_logprobs]
    assert report.everything.tokens == len(logprobs)
    assert report.everything.perplexity == pytest.approx(math.exp(-statistics.fmean(logprobs)), rel=1e-3)
    assert report.answers.tokens == sum(len(text) // 4 for text in TEXTS)


def test_fewer_bits_are_further_away(reports):
    kl = {name: report.everything.kl_divergence for name, report in reports.items()}
    assert 0 == kl["float32"] < kl["float16"] < kl["bfloat16"] < kl["bfloat16 int8"] < kl["bfloat16 int4/32"]
    assert reports["bfloat16 int8"].weight_bytes < 0.35 * reports["float32"].weight_bytes


def test_errors_of_matrices_are_those_of_their_rounding(bench, reports):
    """What the compiled functions hold is seen through products, and is what the reference would have rounded to."""
    matrices = dict(bench._reference.worker.runner.model.named_modules())
    for name, group in (("bfloat16 int8", 0), ("bfloat16 int4/64", 64)):
        inspected = reports[name].inspected
        for matrix, squares in inspected.weights.items():
            exact = matrices[matrix].columns(0, matrices[matrix].num_inputs).T.contiguous()
            own = min(group, 32) if "embed" in matrix else group
            rounded = quantize_int4(exact.bfloat16(), own) if group else quantize_int8(exact.bfloat16())
            expected = (dequantize(rounded) - exact).norm() / exact.norm()
            assert squares.relative == pytest.approx(expected.item(), rel=1e-3), matrix
        assert len(inspected.weights) == 4 * 4 + 1 and len(inspected.products) == 4 * 4
        assert list(inspected.layers) == [f"layers.{number}" for number in range(4)]


def test_errors_are_in_order(reports):
    def worst(name: str, field: str) -> float:
        return max(squares.relative for squares in getattr(reports[name].inspected, field).values())

    for field in ("products", "layers"):
        errors = [worst(name, field) for name in ("float16", "bfloat16", "bfloat16 int8", "bfloat16 int4/32")]
        assert 0 < errors[0] < errors[1] < errors[2] < errors[3] < 1, field


def test_without_flags_all_are_measured_and_with_any_only_that_one():
    def chosen(**flat) -> list[str]:
        return [variant.name for variant in choose_variants(EngineOptions.from_flat(flat), "bfloat16")]

    assert chosen() == [variant.name for variant in VARIANTS]
    assert chosen(quantization="int4", quantization_group_size=32) == ["bfloat16 int4/32"]
    assert chosen(dtype="float32", kv_cache_dtype="int8") == ["float32, KV int8"]
    assert chosen(dtype="auto,float32", pipeline_parallel_size=2) == ["bfloat16,float32"]


def test_sample_is_of_the_first_tokens(bench):
    first = sum(len(text) for text in bench._steps.steps[0])
    sample = bench._reference_sample
    assert {x.shape[0] for x in (*sample.inputs.values(), *sample.layers.values())} == {min(first, 256)}
    assert torch.equal(sample.layers["layers.3"], bench._reference_states[0][:256])
