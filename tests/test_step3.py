"""Step-3.5 and 3.7: tokens and logits of the text part, keys of the published configs, and layers that draft tokens."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint, transformers_greedy
from golden import PROMPTS, check_answers, greedy, recorded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config

SOME = PROMPTS[2:4]
TYPES = ["full_attention", *["sliding_attention"] * 3] * 12
HUB = {
    "architectures": ["Step3p5ForCausalLM"],
    "attention_other_setting": {"attention_type": "sliding_attention", "head_dim": 128, "num_attention_heads": 96},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "layer_types": TYPES,
    "max_position_embeddings": 262144,
    "model_type": "step3p5",
    "moe_intermediate_size": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "swiglu_limits": [0.0] * 43 + [7, 7, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0] * 44 + [16, 0.0, 0.0, 0.0],
    "torch_dtype": "bfloat16",
    "vocab_size": 128896,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("step"), "step3-pictures")


@pytest.fixture(scope="module")
def references(checkpoint):
    return transformers_greedy(checkpoint, SOME, 8, AutoModelForImageTextToText)


@pytest.mark.parametrize("is_text", [False, True])
def test_text_part(is_text, checkpoint, references, tmp_path, caplog):
    """Beside a vision tower, and alone as Step-3.5 is published, in its older keys and with an MTP layer."""
    tensors = load_file(checkpoint / "model.safetensors")
    values = json.loads((checkpoint / "config.json").read_text())
    if is_text:
        tensors = {name: x for name, x in tensors.items() if not name.startswith(("vision", "vit"))}
        tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
        values = values["text_config"] | {"architectures": ["Step3p5ForCausalLM"], "num_nextn_predict_layers": 1}
        values["moe_num_experts"], values["moe_top_k"] = (
            values.pop("n_routed_experts"),
            values.pop("num_experts_per_tok"),
        )
        values["attention_other_setting"] = {"num_attention_heads": values.pop("num_sliding_attention_heads")}
        ropes = [values["rope_parameters"][kind] for kind in values["layer_types"]]
        values["rope_theta"] = [rope["rope_theta"] for rope in ropes] + [1.0]
        values["partial_rotary_factors"] = [rope["partial_rotary_factor"] for rope in ropes] + [1.0]
        values["moe_layers_enum"] = "1,2"
        for key in ("per_layer_config", "rope_parameters", "mlp_layer_types"):
            del values[key]
        values |= {
            key: [*values[key], values[key][0]] for key in ("layer_types", "swiglu_limits", "swiglu_limits_shared")
        }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(checkpoint / name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(values))
    with caplog.at_level(logging.INFO, "labinfer"), recorded(tmp_path) as (llm, rows):
        tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
        check_answers(greedy(llm, SOME, 8), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert ("model.layers.4" if is_text else "vision_model") in line


def test_published_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    config = load_config(tmp_path)
    assert (config.num_layers, config.max_position, config.norm_offset) == (45, 262144, 1.0)
    full, sliding = config.layers[0].mixer, config.layers[1].mixer
    assert [(m.num_heads, m.num_kv_heads, m.window, m.rope.dim) for m in (full, sliding)] == [
        (64, 8, 0, 64),
        (96, 8, 512, 128),
    ]
    assert [layer.mlp.has_experts for layer in config.layers] == [False] * 3 + [True] * 42
    gates = [layer.mlp.gate for layer in config.layers[3:]]
    assert [gate and gate.limit for gate in gates] == [None] * 40 + [7.0, 7.0]
    assert gates[-1].gate_limit == pytest.approx(7.0063, abs=1e-4)
    assert config.layers[44].mlp.shared.gate.limit == 16.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"swiglu_limits": 7}, "swiglu_limits should be a list with a number for each layer, not 7"),
        ({"swiglu_limits_shared": ["7"] * 45}, "swiglu_limits_shared should be finite numbers from 0 on, not '7'"),
        ({"swiglu_limits_shared": [10**400] * 45}, "swiglu_limits_shared should be finite numbers from 0 on, not 1000"),
        ({"rope_theta": [5e6]}, "rope_theta should have an entry per layer, equal in all layers of type"),
        ({"rope_theta": [*range(1, 46)]}, "rope_theta should have an entry per layer, equal in all layers of type"),
        ({"moe_layers_enum": "three"}, "moe_layers_enum should be layers such as 3,4,5, not 'three'"),
        ({"gating": "elementwise"}, "gating 'elementwise' is not supported; only True is"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config is not supported but for the heads"),
    ],
)
def test_config_that_makes_no_sense_is_refused(change, complaint, tmp_path):
    assert "step3-pictures" in CONFIGS
    (tmp_path / "config.json").write_text(json.dumps(HUB | change))
    with pytest.raises(UserError, match=complaint):
        load_config(tmp_path)
