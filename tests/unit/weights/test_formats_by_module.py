"""Formats by module: which matrices a checkpoint quantised, and how, as Transformers and compressed-tensors read it."""

from __future__ import annotations

import pytest
import torch
from published_formats import PUBLISHED, gptq, packed
from safetensors.torch import save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from labinfer.base.registry import REGISTRY
from labinfer.weights.formats.registry import read_formats
from labinfer.weights.formats.settings import Excluded, Settings, Targets

GPTQ = gptq(4, 128, sym=True)[0]
W4A16 = packed(4, 128, sym=True)[0]


def chosen(config: dict, *names: str) -> list[str]:
    formats = REGISTRY.find("weight_format", config["quant_method"])(Settings(config))
    return [type(formats(name)).__name__.removesuffix("Format") for name in names]


NAMES = (
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.up_proj",
    "lm_head",
    "model.embed_tokens",
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            awq_config := {"quant_method": "awq", "modules_to_not_convert": ["gate"]},
            ["Plain", "Awq", "Awq", "Plain", "Plain"],
        ),
        (awq_config | {"modules_to_not_convert": ["model.layers.1"]}, ["Plain", "Plain", "Awq", "Plain", "Plain"]),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]},
            ["Plain", "Fp8", "Fp8", "Plain", "Plain"],
        ),
        (GPTQ | {"lm_head": True, "dynamic": {r"-:.*\.1\.mlp\.gate$": {}}}, ["Plain", "Gptq", "Gptq", "Gptq", "Plain"]),
        (W4A16 | {"ignore": ["re:.*mlp.gate$", "lm_head"]}, ["Plain", "Packed", "Packed", "Plain", "Plain"]),
        (W4A16 | {"ignore": []}, ["Packed", "Packed", "Packed", "Packed", "Plain"]),
    ],
)
def test_excluded_modules_stay_plain(config, expected):
    assert chosen(config, *NAMES) == expected


def test_scheme_of_a_named_module_comes_before_that_of_its_class():
    eight = {
        "targets": ["re:.*gate_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "format": "int-quantized",
    }
    config = W4A16 | {"ignore": [], "config_groups": W4A16["config_groups"] | {"group_1": eight}}
    assert chosen(config, *NAMES[:3]) == ["Packed", "Int", "Packed"]


def test_act_order_is_told_once():
    for name in ("gptq-act-order", "w4a16-act-order"):
        formats = read_formats({"quantization_config": PUBLISHED[name].quantization_config}, "config.json")
        assert not formats.warnings
        for matrix in NAMES:
            formats(matrix)
        assert len(formats.warnings) == 1 and "act-order" in formats.warnings[0]
    formats = read_formats({"quantization_config": PUBLISHED["awq"].quantization_config}, "config.json")
    assert type(formats(NAMES[1])).__name__ == "AwqFormat" and not formats.warnings


def test_order_that_is_none_is_seen_matrix_by_matrix(tmp_path):
    """The config says act-order for all; the tensors of some say otherwise."""
    config = gptq(4, 128, sym=True, act_order=True)[0]
    trivial = torch.arange(256, dtype=torch.int32) // 128
    save_file({f"{NAMES[1]}.g_idx": trivial, f"{NAMES[2]}.g_idx": trivial.flip(0)}, tmp_path / "model.safetensors")
    formats = read_formats({"quantization_config": config}, tmp_path / "config.json")
    assert [type(formats(name)).__name__ for name in NAMES[1:3]] == ["GptqFormat", "ReorderedFormat"]


PATHS = (
    *NAMES,
    "model.layers.1.mlp.shared_expert_gate",
    "model.layers.1.mlp.experts.10.up_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.0.linear_attn.in_proj_ba",
)
KEYS = (
    *("gate", "mlp.gate", "model.layers.1", "model.layers.1.", "layers.1", "lm_head", "proj", "q_proj", "model", "mod"),
    *(
        r"model.layers.\d+.mlp.gate",
        r"model\.layers\.(0|10)",
        r".*\.experts",
        ".*gate",
        "model.layers.1.*",
        "in_proj_b",
    ),
    *("model.layers.0.linear_attn.in_proj_ba", "", "embed_tokens", ".*self_attn$", "model.layers.1|lm_head"),
)


@pytest.mark.parametrize("key", KEYS)
def test_modules_are_excluded_as_transformers_excludes_them(key):
    for keys in ([key], [key, "visual"]):
        excluded = Excluded(keys)
        assert {path: excluded.matches(path) for path in PATHS} == {
            path: not should_convert_module(path, keys) for path in PATHS
        }


def test_expression_that_is_none_excludes_by_its_letters_alone():
    assert Excluded(["q_proj["]).matches("model.layers.0.q_proj[") and not Excluded(["["]).matches(NAMES[0])


@pytest.mark.parametrize("inside", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("named", ["model.language_model.", "language_model.model.", "model."])
def test_text_model_inside_of_another_goes_by_each_of_its_names(inside, named):
    paths = [f"{inside}layers.{layer}.mlp.gate" for layer in (1, 11)]
    for given in (
        Excluded([f"{named}layers.1"]),
        Targets([f"re:{named}layers.1\\."]),
        Targets([f"{named}layers.1.mlp.gate"]),
    ):
        assert [given.matches(path) for path in paths] == [True, False]
