"""Limits of workloads, against numbers computed by hand for tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from labinfer.base.config import EngineOptions
from labinfer.cli.bench.workload_limits import NewTokens, PackedBytes, WorkloadLimits, _visible_keys
from labinfer.cli.bench.workloads import BenchWorkload
from labinfer.comm.spmd.machine import describe_rank
from labinfer.functions.roofline_limits import RooflineLimits
from labinfer.launch.layout.layout import make_layout
from labinfer.models.decoder import Decoder
from labinfer.models.registry import load_config
from labinfer.weights.loader import pack_weights

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MAMBA = DENSE | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
QKV, OUT, MLP, HEAD = 128 * 64, 64 * 64, 3 * 96 * 64, 100 * 64
EXPERT = 3 * 32 * 64
KEY = 2 * 2 * 16 * 2
"""Bytes of a token's keys and values in a layer, in bfloat16."""
PAIR = 4 * 4 * 16
"""Operations of attention for a token and a key that it sees, in a layer."""
READING = RooflineLimits(1, memory=1e6, float32=1e30, dot=0, int8=0)
ARITHMETIC = RooflineLimits(1, memory=1e30, float32=1e6, dot=0, int8=4e6)


def tiny_model(directory: Path, config: dict, quantization: str = "none") -> Decoder:
    (directory / "config.json").write_text(json.dumps(config))
    options = EngineOptions.from_flat({"device": "cpu", "dtype": "bfloat16", "quantization": quantization})
    layout = make_layout(options, load_config(directory), [describe_rank(0, 0, "node")])
    return layout.meta(layout.topology.place(0)).model


def limits_of(model: Decoder, rates: RooflineLimits, packed: PackedBytes | None = None) -> WorkloadLimits:
    return WorkloadLimits(model, packed or PackedBytes(0.0), torch.bfloat16, rates)


@pytest.mark.parametrize(
    ("config", "matrices", "experts"),
    [(DENSE, 3 * (QKV + OUT + MLP) + HEAD, 0), (MIXTURE, 3 * (QKV + OUT) + HEAD, 3 * 8 * EXPERT)],
    ids=["dense", "mixture"],
)
def test_bytes_are_those_of_matrices_without_an_embedding_of_its_own(tmp_path, config, matrices, experts):
    model = tiny_model(tmp_path, config)
    pack_weights(model)
    assert PackedBytes.from_model(model) == PackedBytes(2 * matrices, 2 * experts)


def test_decode_step_reads_matrices_active_experts_and_keys(tmp_path):
    dense = limits_of(tiny_model(tmp_path, DENSE), READING, PackedBytes(5000.0))
    assert dense.step_seconds([NewTokens(10, 1)]) == pytest.approx((5000 + 3 * 11 * KEY) / 1e6)
    assert dense.step_seconds([NewTokens(10, 1), NewTokens(3, 1)]) == pytest.approx((5000 + 3 * 15 * KEY) / 1e6)
    mixture = limits_of(tiny_model(tmp_path, MIXTURE), READING, PackedBytes(5000.0, 8000.0))
    assert mixture.step_seconds([NewTokens(10, 1)]) == pytest.approx((5000 + 2000 + 3 * 11 * KEY) / 1e6)
    chosen = 1 - 0.75**2  # an expert is not chosen by either of two tokens with 0.75 ** 2
    two = 5000 + 8000 * chosen + 3 * 22 * KEY
    assert mixture.step_seconds([NewTokens(10, 1)] * 2) == pytest.approx(two / 1e6)


def test_states_of_mamba_are_read_by_every_sequence_and_computed_for_every_token(tmp_path):
    state, model = 4 * 32 * 8, tiny_model(tmp_path, MAMBA)
    reading = limits_of(model, READING, PackedBytes(5000.0))
    assert reading.step_seconds([NewTokens(10, 1)] * 2) == pytest.approx((5000 + 2 * (2 * 4 * state + 11 * KEY)) / 1e6)
    in_proj, out_proj = (2 * 128 + 2 * 8 + 4) * 64, 128 * 64
    mamba = 2 * (2 * (in_proj + out_proj + MLP) + 5 * state)
    rest = 5 * 2 * QKV + 5 * PAIR + 2 * (OUT + MLP + HEAD)
    assert limits_of(model, ARITHMETIC).step_seconds([NewTokens(0, 5)]) == pytest.approx((5 * mamba + rest) / 1e6)


def test_prompt_is_arithmetic_of_all_rows_but_for_the_end_of_the_last_layer(tmp_path):
    """Of five tokens, each sees those before it and itself: 15 pairs; the last one sees 5."""
    attention = PAIR * (2 * 15 + 5)
    dense = 2 * (5 * (2 * (QKV + OUT + MLP) + QKV) + OUT + MLP + HEAD)
    limits = limits_of(tiny_model(tmp_path, DENSE), ARITHMETIC)
    assert limits.step_seconds([NewTokens(0, 5)]) == pytest.approx((dense + attention) / 1e6)
    active = 2 * EXPERT
    mixture = 2 * (5 * (2 * (QKV + OUT + active) + QKV) + OUT + active + HEAD)
    limits = limits_of(tiny_model(tmp_path, MIXTURE), ARITHMETIC)
    assert limits.step_seconds([NewTokens(0, 5)]) == pytest.approx((mixture + attention) / 1e6)


def test_products_of_quantized_weights_have_the_rate_of_eight_bits(tmp_path):
    limits = limits_of(tiny_model(tmp_path, DENSE, "int8"), ARITHMETIC)
    products = 2 * (3 * (QKV + OUT + MLP) + HEAD)
    assert limits.step_seconds([NewTokens(10, 1)]) == pytest.approx(products / 4e6 + 3 * 11 * PAIR / 1e6)


def test_workload_is_a_step_of_all_prompts_and_the_decode_steps(tmp_path):
    rates = RooflineLimits(1, memory=1e6, float32=1e8, dot=0, int8=0)
    limits = limits_of(tiny_model(tmp_path, DENSE), rates, PackedBytes(5000.0))
    prompts = limits.step_seconds([NewTokens(0, 4), NewTokens(0, 6)])
    both, alone = limits.step_seconds([NewTokens(4, 1), NewTokens(6, 1)]), limits.step_seconds([NewTokens(7, 1)])
    work = [[1] * 4, [1] * 6], [2, 3]
    assert limits.tokens_per_second(BenchWorkload("batch", *work)) == pytest.approx(5 / (prompts + both + alone))
    assert limits.tokens_per_second(BenchWorkload("decode", *work)) == pytest.approx(3 / (both + alone))
    assert limits.tokens_per_second(BenchWorkload("prefill", *work)) == pytest.approx(10 / prompts)


def test_tokens_see_the_keys_of_their_window():
    for window in (0, 1, 3, 8):
        for cached in range(6):
            for count in range(1, 8):
                ends = range(cached + 1, cached + count + 1)
                expected = sum(min(end, window) if window else end for end in ends)
                assert _visible_keys(NewTokens(cached, count), window) == expected
