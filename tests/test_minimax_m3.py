"""MiniMax-M3 as published: names beside a vision tower, its config, and contexts no longer than those in which its attention is dense."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, greedy, recorded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from labinfer import LLM
from labinfer.base.errors import UserError
from labinfer.models.registry import load_config

SOME = PROMPTS[2:4]
FREQ = [0, 0, 0, *[1] * 57]
HUB = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": {
        "dense_intermediate_size": 12288,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "max_position_embeddings": 524288,
        "moe_layer_freq": FREQ,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "shared_intermediate_size": 3072,
        "sparse_attention_config": {
            "sparse_attention_freq": FREQ,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 16,
        },
        "vocab_size": 200064,
    },
    "torch_dtype": "bfloat16",
}


def test_text_part_in_the_names_of_the_hub(tmp_path, caplog):
    directory = make_checkpoint(tmp_path, "minimax-m3-pictures")
    references = transformers_greedy(directory, SOME, 8, AutoModelForImageTextToText)
    tensors = load_file(directory / "model.safetensors")
    layer = "language_model.model.layers.1"
    assert {f"{layer}.block_sparse_moe.experts.0.w1.weight", f"{layer}.self_attn.index_q_proj.weight"} < tensors.keys()
    extra = {"language_model.model.mtp.layers.0.input_layernorm.weight": torch.ones(2)}
    save_file(tensors | extra, directory / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "labinfer"), recorded(directory) as (llm, rows):
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert "vision_tower" in line and "multi_modal_projector" in line and "mtp" in line


def test_published_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    config = load_config(tmp_path)
    assert (config.num_layers, config.max_position, config.norm_offset) == (60, 2048, 1.0)
    assert "contexts are limited to 2048 of 524288 tokens" in config.notes[0]
    assert [layer.mlp.has_experts for layer in config.layers] == [False] * 3 + [True] * 57
    attention, mixture = config.layers[3].mixer, config.layers[3].mlp
    assert (attention.num_kv_heads, attention.rope.dim, attention.qk_norm_offset) == (4, 64, 1.0)
    assert (mixture.router.scale, mixture.shared.intermediate_size, mixture.gate.limit) == (2.0, 3072, 7.0)


def test_context_in_which_attention_is_sparse_is_refused(tmp_path, caplog):
    """With two blocks of 8 keys, longer contexts give other tokens in Transformers, whose attention is sparse there."""
    directory = make_checkpoint(tmp_path, "minimax-m3", index_block_size=8, index_topk_blocks=2)
    with pytest.raises(UserError, match="max_model_len 17 exceeds the model's maximum of 16 positions"):
        LLM(str(directory), max_model_len=17)
    prompts = [PROMPTS[0], PROMPTS[4]]
    references = transformers_greedy(directory, prompts, 8)
    with recorded(directory) as (llm, rows):
        assert "sparse attention is not supported: contexts are limited to 16 of 512 tokens" in caplog.text
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, prompts, 8), rows, tokens, logits)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types should be a list of 4 times dense or sparse"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types should be a list of 4 times full_attention or mini"),
        ({"swiglu_limit": 0}, "swiglu_limit should be above 0"),
    ],
)
def test_config_that_makes_no_sense_is_refused(change, complaint, tmp_path):
    values = json.loads(CONFIGS["minimax-m3"]().to_json_string()) | {"architectures": ["MiniMaxM3VLForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=complaint):
        load_config(tmp_path)
