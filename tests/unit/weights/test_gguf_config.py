"""Configs of GGUF files: what only one family has, and what files leave to the reader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import ExpertGatingFuncType, GGUFWriter
from gguf_files import finish

from labinfer.base.errors import UserError
from labinfer.weights.gguf.config import gguf_config
from labinfer.weights.gguf.file import GgufFile

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "add_block_count": 7,
    "add_context_length": 512,
    "add_embedding_length": 64,
    "add_head_count": 4,
    "add_layer_norm_rms_eps": 1e-6,
}
LATENT = {
    "add_kv_lora_rank": 512,
    "add_rope_dimension_count": 64,
    "add_key_length_mla": 192,
    "add_value_length_mla": 128,
    "add_leading_dense_block_count": 3,
    "add_expert_count": 256,
    "add_expert_used_count": 8,
    "add_expert_shared_count": 1,
    "add_expert_feed_forward_length": 32,
}


def config(tmp_path, architecture: str, tensors: tuple[str, ...] = (), **sizes: Any) -> dict[str, Any]:
    writer = GGUFWriter(tmp_path / "a.gguf", architecture)
    for method, value in (SIZES | sizes).items():
        getattr(writer, method)(value)
    for name in ("token_embd.weight", *tensors):
        writer.add_tensor(name, np.zeros((3, 64), np.float32))
    finish(writer)
    return gguf_config(GgufFile(tmp_path / "a.gguf"))


def test_gemmas_queries_are_scaled_by_a_head_but_in_the_largest(tmp_path):
    sizes = {"add_key_length": 32, "add_value_length": 32, "add_sliding_window": 128}
    small = config(tmp_path, "gemma3", **sizes)
    assert small["query_pre_attn_scalar"] == 32 and small["sliding_window"] == 128 and "layer_types" not in small
    assert config(tmp_path, "gemma3", **sizes, add_block_count=62)["query_pre_attn_scalar"] == 16


def test_gemmas_windows_and_ropes_are_the_files(tmp_path):
    assert config(tmp_path, "gemma3")["layer_types"] == [FULL] * 7
    sizes = {"add_sliding_window": 8, "add_rope_freq_base": 1e6, "add_final_logit_softcapping": 30.0}
    linear = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0}
    values = config(tmp_path, "gemma3", **sizes, **linear, add_sliding_window_pattern=3)
    assert values["sliding_window_pattern"] == 3 and values["final_logit_softcapping"] == 30.0
    assert values["rope_parameters"] == {
        FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    values = config(tmp_path, "gemma3", **sizes, add_sliding_window_pattern=[True, False] * 4)
    assert values["layer_types"] == [SLIDING, FULL] * 3 + [SLIDING]


def test_gpt_oss_goes_on_behind_the_end_of_a_message(tmp_path):
    experts = {
        "add_expert_count": 4,
        "add_expert_used_count": 2,
        "add_expert_feed_forward_length": 32,
        "add_sliding_window": 128,
    }
    tokens = {
        "add_token_list": ["<|endoftext|>", "<|end|>", "<|return|>", "<|call|>"],
        "add_token_types": [3] * 4,
        "add_eos_token_id": 2,
        "add_eot_token_id": 1,
    }
    assert config(tmp_path, "gpt-oss", **experts, **tokens)["eos_token_id"] == [2, 3]


def test_yarn_of_gpt_oss_does_not_round(tmp_path):
    experts = {"add_expert_count": 4, "add_expert_used_count": 2, "add_expert_feed_forward_length": 32}
    yarn = {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 32.0,
        "add_rope_scaling_orig_ctx_len": 4096,
    }
    assert not config(tmp_path, "gpt-oss", **experts, **yarn, add_sliding_window=128)["rope_parameters"]["truncate"]


def test_router_of_deepseek_is_told_by_file_or_tensors(tmp_path):
    values = config(tmp_path, "deepseek2", **LATENT)
    assert values["architectures"] == ["DeepseekV2ForCausalLM"] and values["topk_method"] == "greedy"
    assert (values["qk_nope_head_dim"], values["v_head_dim"], "head_dim" in values) == (128, 128, False)
    grouped = config(tmp_path, "deepseek2", **LATENT, add_expert_group_count=8, add_expert_group_used_count=3)
    assert (grouped["topk_method"], grouped["n_group"], grouped["topk_group"]) == ("group_limited_greedy", 8, 3)
    bias = ("blk.3.exp_probs_b.bias",)
    for found in (
        config(tmp_path, "deepseek2", bias, **LATENT),
        config(tmp_path, "deepseek2", **LATENT, add_expert_gating_func=ExpertGatingFuncType.SIGMOID),
    ):
        assert found["architectures"] == ["DeepseekV3ForCausalLM"] and (found["n_group"], found["topk_group"]) == (8, 4)
    kimi = config(tmp_path, "deepseek2", bias, **LATENT | {"add_expert_count": 384})
    assert (kimi["n_group"], kimi["topk_group"]) == (1, 1)


def test_sharpness_of_deepseek_is_ten_times_the_files(tmp_path):
    yarn = {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 40.0,
        "add_rope_scaling_orig_ctx_len": 4096,
        "add_rope_scaling_yarn_log_mul": 0.0707,
    }
    rope = config(tmp_path, "deepseek2", **LATENT, **yarn)["rope_parameters"]
    assert rope["mscale"] == rope["mscale_all_dim"] == 0.707 and "partial_rotary_factor" not in rope


REFUSED = {
    "gate": (
        "deepseek2",
        LATENT | {"add_expert_gating_func": SimpleNamespace(value=4)},
        "gating_func 4 is not",
    ),
    "keys": (
        "deepseek2",
        LATENT | {"add_key_length_mla": 64},
        "keys of 64 dimensions cannot have 64 rotary dimensions",
    ),
    "experts": ("gpt-oss", {}, "has no 'gpt-oss.expert_count' in its metadata"),
}


@pytest.mark.parametrize(("architecture", "sizes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_no_such_model_has_is_refused(tmp_path, architecture, sizes, complaint):
    with pytest.raises(UserError, match=complaint) as refusal:
        config(tmp_path, architecture, **sizes)
    assert "\n" not in str(refusal.value)


GEMMA4 = {
    "add_sliding_window": 128,
    "add_sliding_window_pattern": [True] * 6 + [False],
    "add_key_length": 32,
    "add_value_length": 32,
    "add_head_count_kv": [2] * 6 + [1],
    "add_feed_forward_length": [48] * 7,
    "add_shared_kv_layers": 3,
}
WRONG = {
    "pattern": ("gemma4", GEMMA4 | {"add_sliding_window_pattern": [True]}, "should have a flag for each of 7 layers"),
    "columns": ("gemma4", GEMMA4 | {"add_feed_forward_length": [48] * 5 + [96] * 2}, "the last 3 have twice the size"),
    "heads": ("gemma4", GEMMA4 | {"add_head_count_kv": [2] * 3}, "should be an integer, or a list of 7 integers"),
    "part": ("gemma4", GEMMA4 | {"add_rope_dimension_count_swa": 8}, "dimension_count_swa 8 differs"),
    "rope": ("gemma4", GEMMA4, r"has no tensor rope_freqs\.weight"),
    "vision": ("glm4", {"add_rope_dimension_sections": [8, 12, 12, 0]}, "is a GLM-4V"),
    "scores": (
        "minimax-m2",
        {
            "add_expert_count": 4,
            "add_expert_used_count": 2,
            "add_expert_feed_forward_length": 32,
            "add_expert_gating_func": ExpertGatingFuncType.SOFTMAX,
        },
        r"expert_gating_func 1 is not supported; only 2 \(sigmoid\) is",
    ),
}


@pytest.mark.parametrize(("architecture", "sizes", "complaint"), WRONG.values(), ids=WRONG)
def test_values_that_no_config_can_have_are_refused(tmp_path, architecture, sizes, complaint):
    with pytest.raises(UserError, match=complaint) as refusal:
        config(tmp_path, architecture, **sizes)
    assert "\n" not in str(refusal.value)


def test_projections_that_early_files_of_qwen3_next_have_are_refused(tmp_path):
    delta = ("conv_kernel", "group_count", "time_step_rank", "state_size", "inner_size")
    experts = ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
    sizes = {f"add_ssm_{name}": 4 for name in delta} | {f"add_expert_{name}": 4 for name in experts}
    with pytest.raises(UserError, match="has tensors ssm_in of an early version"):
        config(tmp_path, "qwen3next", ("blk.0.ssm_in.weight",), **sizes, add_full_attention_interval=4)
