"""Latent attention through ``LLM`` in one process, against Transformers in fp32: tokens and logits in every way of the engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import GROUPS, LATENT, LATENTS, transformers_logprobs, write_tokenizer
from golden import BEAM_PROMPTS, BEAMS, PROMPTS, check_answers, golden, greedy, recorded, relative_error
from launchers import LAUNCH
from published_formats import PUBLISHED, write_published
from transformers import AutoModelForCausalLM, DeepseekV3Config

from labinfer import LLM, SamplingParams
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.cli.commands.layout import HEADER, layout_rows
from labinfer.launch.layout.layout import make_layout

SIX = PROMPTS[:6]


@pytest.fixture(scope="module")
def checkpoint():
    return golden("deepseek-v3").directory


@pytest.mark.each_value
@pytest.mark.parametrize("kind", LATENTS)
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_tokens_and_logits_are_those_of_transformers(kind, chunk):
    """Some prompts are expanded, some absorbed."""
    with recorded(golden(kind).directory, chunked_prefill_size=chunk) as (llm, rows):
        check_answers(greedy(llm), rows, golden(kind).tokens, golden(kind).logits)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["deepseek-v2-lite", "deepseek-v3-plain"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_each_form_alone_gives_the_logits_of_transformers(kind, form):
    with recorded(golden(kind).directory, functions=(f"latent_attention={form}",)) as (llm, rows):
        check_answers(greedy(llm), rows, golden(kind).tokens, golden(kind).logits)


def test_fp8_blocks_that_rows_do_not_fill(tmp_path):
    """As DeepSeek publishes V3: 576 rows for latents and rotated parts have 5 blocks of 128, the last one half full."""
    directory, twin = tmp_path / "model", tmp_path / "twin"
    torch.manual_seed(3)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 192, "num_hidden_layers": 2}
    config = DeepseekV3Config(**LATENT | sizes, **GROUPS, first_k_dense_replace=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)
    linears = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tensors = write_published(directory, twin, replace(PUBLISHED["fp8"], linears=linears))
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
    with LLM(str(directory), num_kv_blocks=64, quantization="none") as llm:
        outputs = llm.generate(SIX[2:4], SamplingParams(max_tokens=1, prompt_logprobs=0))
    got = [entry.logprob for output in outputs for entry in output.prompt_logprobs]
    assert got == pytest.approx(transformers_logprobs(twin, SIX[2:4]), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_token(mode):
    reference, swap = golden("deepseek-v2"), {"swap_space": 0.002} if mode == "swap" else {}
    with recorded(reference.directory, num_kv_blocks=60, preemption_mode=mode, **swap) as (llm, rows):
        check_answers(greedy(llm), rows, reference.tokens, reference.logits)
        counts = llm.report.counts
        assert counts["preemptions"] > 0 and (counts["swaps"] > 0) == (mode == "swap")


def test_hits_change_no_token():
    reference = golden("deepseek-v2")
    with recorded(reference.directory) as (llm, rows):
        for _ in range(2):
            rows.clear()
            check_answers(greedy(llm), rows, reference.tokens, reference.logits)
        assert llm.report.counts["found"] > 0


def test_beams_are_those_of_transformers(checkpoint):
    with recorded(checkpoint) as (llm, _):
        outputs = llm.generate(BEAM_PROMPTS, SamplingParams(ignore_eos=True, n=BEAMS["num_beams"], **BEAMS))
    assert [[item.token_ids for item in output.completions] for output in outputs] == golden("deepseek-v3").beams


@pytest.mark.parametrize("functions", ["reference", "auto"])
def test_bfloat16_is_near_float32(checkpoint, functions):
    with recorded(checkpoint, dtype="bfloat16", functions=(functions,)) as (llm, rows):
        greedy(llm, SIX, num_tokens=1)
    expected_PV = golden("deepseek-v3").logits[:6, 0]
    pairs = [(rows[tuple(p)].float(), want_V) for p, want_V in zip(SIX, expected_PV, strict=True)]
    cosines = [float(torch.cosine_similarity(got_V, want_V, dim=0)) for got_V, want_V in pairs]
    assert sum(cosines) / len(cosines) > 0.98  # an expert may be another one


def test_int8_cache_is_near_float32(checkpoint):
    with recorded(checkpoint, kv_cache_dtype="int8", chunked_prefill_size=16) as (llm, rows):
        greedy(llm, SIX, num_tokens=1)
        pools = llm._parts.worker.runner.cache.layers[0].tensors()
    assert [tensor.dtype for tensor in pools] == [torch.int8, torch.float32]
    expected_PV = golden("deepseek-v3").logits[:6, 0]
    errors = [relative_error(rows[tuple(p)], want_V) for p, want_V in zip(SIX, expected_PV, strict=True)]
    assert max(errors) > 1e-4 and sorted(errors)[len(errors) // 2] < 0.1


@pytest.mark.parametrize(("kv_cache_dtype", "size"), [("auto", "768 B"), ("int8", "224 B")])
def test_plan_shows_one_latent_a_token_and_layer_on_every_rank(checkpoint, kv_cache_dtype, size):
    """4 layers of 36 + 12 numbers; int8 has two scales of 4 bytes beside them. The ranks of a stage have the same."""
    with LLM(str(checkpoint), num_kv_blocks=8) as llm:
        config, info = llm.layout.config, llm.group.everyone[0]
    import msgspec

    everyone = [msgspec.structs.replace(info, rank=rank, local_rank=rank) for rank in range(3)]
    options = {"tensor_parallel_size": 3, "kv_cache_dtype": kv_cache_dtype}
    layout = make_layout(EngineOptions.from_flat(options), config, everyone)
    rows = layout_rows(layout, everyone, [100] * 3, [None] * 3)
    assert [row[HEADER.index("KV/token")] for row in rows] == [size] * 3
    assert all(layout.meta(place).is_cache_replicated for place in layout.topology.places)
    weights = [layout.weight_bytes(place) for place in layout.topology.places]
    assert weights[0] > weights[1]  # 4, 3 and 3 heads


@pytest.mark.parametrize(("tp_size", "is_told"), [(1, False), (2, True)])
def test_plan_says_that_tensor_parallelism_makes_no_token_smaller(checkpoint, tp_size, is_told):
    command = [sys.executable, LAUNCH, "plan", "--model", str(checkpoint), "-tp", str(tp_size)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("each tensor-parallel rank caches the full MLA latent" in said) is is_told


def test_sliding_window_is_refused(checkpoint):
    with pytest.raises(
        UserError, match="^sliding_window 8: this model's latent attention has no windows; leave it out"
    ):
        LLM(str(checkpoint), sliding_window=8, num_kv_blocks=60)
