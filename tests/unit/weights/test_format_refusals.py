"""Checkpoints that cannot be read: refused with the value, in a line, before memory is taken."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import make_checkpoint
from published_formats import PUBLISHED, gptq, packed, write_published
from published_models import check_slices, load
from safetensors.torch import load_file, save_file
from tiny_llama import model_of, write

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config, model_class
from labinfer.weights.loader import check_checkpoint, load_weights
from labinfer.weights.model_files import open_model


@pytest.mark.parametrize("name", ["gptq-asym", "awq", "w4a16-asym", "w8a8", "fp8", "gptq-act-order"])
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_damaged_tensor_is_refused_before_memory_is_taken(checkpoints, tmp_path, name, damage):
    directory, _ = checkpoints(name)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    prefix = "model.layers.0.mlp.down_proj."
    for suffix in [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]:
        broken = dict(tensors)
        tensor = broken.pop(prefix + suffix)
        if suffix == "weight_shape" or (name in ("gptq-asym", "awq") and suffix == "g_idx"):
            continue
        if damage == "shape":
            broken[prefix + suffix] = tensor.view(torch.uint8).repeat(2, *(1,) * (tensor.ndim - 1)).view(tensor.dtype)
        elif damage == "dtype":
            broken[prefix + suffix] = torch.zeros(tensor.shape, dtype=torch.int16)
        write(tmp_path, broken, **config)
        with torch.device("meta"):
            model = model_of(load_config(tmp_path))
        with pytest.raises(UserError, match=rf"tensor {prefix}{suffix} (of|has|holds) "):
            check_slices(model, open_model(tmp_path).open_weights())


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_float8_that_is_no_number_is_refused(checkpoints, tmp_path, quantization):
    directory, _ = checkpoints("fp8")
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[5, 7] = 0x7F
    write(tmp_path, tensors, **config)
    with pytest.raises(UserError, match=r"up_proj of the checkpoint contains nan"):
        load(tmp_path, quantization=quantization)


GPTQ = gptq(4, 128, sym=True)[0]
W4A16 = packed(4, 128, sym=True)[0]


def scheme(**changes) -> dict:
    weights = W4A16["config_groups"]["group_0"]["weights"] | changes
    return W4A16 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (GPTQ | {"bits": 3}, r"\(gptq\): bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"bits": None}, "bits None is not supported; supported: 4, 8"),
        (GPTQ | {"group_size": 24}, "group_size 24 is not supported; supported: multiples of 16"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (GPTQ | {"sym": "yes"}, "sym should be bool, not 'yes'"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 2}}}, r"dynamic\.\+:\.\*up_proj\.bits 2 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point False is not supported; supported: True"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size should be .*not \[128\]"),
        (
            W4A16 | {"format": "marlin-24"},
            "format 'marlin-24' is not supported; supported: pack-",
        ),
        (W4A16 | {"config_groups": []}, r"config_groups should be an object, not \[\]"),
        (scheme(num_bits=2), r"config_groups\.group_0\.weights\.num_bits 2 is not supported; supported: 4, 8"),
        (
            scheme(strategy="tensor_group"),
            "weights.strategy 'tensor_group' is not supported; supported: channel, group",
        ),
        (scheme(actorder="dynamic"), "actorder 'dynamic' is not supported; supported: none, weight, static, group"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format 'sparse-24' is not supported"),
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method 'bitsandbytes', which is not supported \(supported: fp8, compressed-",
        ),
    ],
)
def test_scheme_that_is_not_supported_is_refused_with_its_value(tmp_path, config, complaint):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors, quantization_config=config)
    for read in (load_config, lambda directory: open_model(directory).open_weights()):
        with pytest.raises(UserError, match=f"config.json: quantization_config .*{complaint}") as error:
            read(directory)
        assert "\n" not in str(error.value)


def test_truncated_file_is_refused(checkpoints, tmp_path):
    directory, _ = checkpoints("w4a16")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors is not a valid safetensors file"):
        open_model(tmp_path).open_weights()


def changed(checkpoints, tmp_path, name: str, change, **settings):
    """A whole model on the meta device, and a checkpoint that is to be refused for it: tensors changed, or the config."""
    directory, _ = checkpoints(name)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    config["quantization_config"] |= settings
    write(tmp_path, change(tensors) or tensors, **config)
    with torch.device("meta"):
        return model_of(load_config(tmp_path)), open_model(tmp_path).open_weights()


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("gptq-asym", {"sym": True}, r"q_proj.qzeros has zero points other than 8, .* says sym true; set it to false"),
        (
            "gptq-act-order",
            {"desc_act": False},
            r"q_proj.g_idx permutes the inputs .* desc_act false; set it to true",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_refused_before_memory_is_taken(
    checkpoints, tmp_path, name, settings, complaint
):
    model, checkpoint = changed(checkpoints, tmp_path, name, lambda tensors: None, **settings)
    with pytest.raises(UserError, match=complaint) as error:
        check_checkpoint(model, checkpoint, tied_head=False)
    assert "\n" not in str(error.value)


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("group", [-1, 11])
def test_group_that_is_none_is_refused(checkpoints, tmp_path, group):
    def change(tensors):
        tensors[f"{DOWN}.g_idx"][5] = group

    model, checkpoint = changed(checkpoints, tmp_path, "gptq-act-order", change)
    with pytest.raises(UserError, match=rf"{DOWN}.g_idx has group {group}, but has only groups 0 to 10"):
        check_checkpoint(model, checkpoint, tied_head=False)
    with pytest.raises(UserError, match=f"has group {group}"):  # as on every rank, whose part of it may be another
        load_weights(model, checkpoint, torch.device("cpu"), lambda done, total: None)


def test_bias_that_has_no_place_is_refused_unless_it_adds_nothing(checkpoints, tmp_path):
    for value in (0.0, 0.5):
        bias = {f"{DOWN}.bias": torch.full((160,), value, dtype=torch.float16)}
        model, checkpoint = changed(checkpoints, tmp_path, "gptq-sym", lambda tensors, bias=bias: tensors | bias)
        if not value:
            check_checkpoint(model, checkpoint, tied_head=False)
    with pytest.raises(UserError, match=rf"has tensor {DOWN}.bias, which the model of its config.json does not use"):
        check_checkpoint(model, checkpoint, tied_head=False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weight": lambda one: one.to(torch.float8_e5m2)}, f"{DOWN}.weight holds F8_E5M2, not torch.float8_e4m3fn"),
        ({"weight": lambda one: one.bfloat16()}, f"{DOWN}.weight holds BF16, not torch.float8_e4m3fn"),
        ({"weight_scale_inv": None}, rf"no tensor {DOWN}.weight_scale_inv of shape \[2, 11\]"),
        (
            {"weight": lambda one: one.to(torch.float8_e5m2), "weight_scale_inv": None},
            f"{DOWN}.weight holds F8_E5M2, not torch.float8_e4m3fn",
        ),
        ({"weight_scale_inv": lambda one: one[:, :5]}, r"weight_scale_inv has shape \[2, 5\], but .* \[2, 11\]"),
        ({"weight_scale_inv": lambda one: one.to(torch.int32)}, "weight_scale_inv holds I32, but a floating-point"),
    ],
)
def test_eight_bits_without_their_meaning_are_refused(checkpoints, tmp_path, change, complaint):
    def damage(tensors):
        for suffix, new in change.items():
            tensor = tensors.pop(f"{DOWN}.{suffix}")
            if new is not None:
                tensors[f"{DOWN}.{suffix}"] = new(tensor).contiguous()

    with pytest.raises(UserError, match=complaint):
        check_checkpoint(*changed(checkpoints, tmp_path, "fp8", damage), tied_head=False)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-modelopt"])
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_scale_of_a_matrix_that_is_not_finite_and_above_0_is_refused(checkpoints, tmp_path, name, value):
    scale = f"{DOWN}.weight_global_scale" if name == "nvfp4" else f"{DOWN}.weight_scale_2"
    model, checkpoint = changed(checkpoints, tmp_path, name, lambda tensors: tensors | {scale: torch.tensor([value])})
    with pytest.raises(UserError, match=f"{scale} is {value:g}; it should be finite and above 0"):
        check_checkpoint(model, checkpoint, tied_head=False)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4-packed"])
def test_scale_of_a_group_that_is_nan_is_refused(checkpoints, tmp_path, name):
    directory, _ = checkpoints(name)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[5, 2] = 0xFF
    write(tmp_path, tensors, **config)
    with pytest.raises(UserError, match=f"{DOWN}.weight_scale of the checkpoint contains nan"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_in_a_plain_checkpoint_are_refused(tmp_path, dtype):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors | {"model.layers.1.mlp.up_proj.weight": torch.ones(64, 48).to(dtype)})
    with pytest.raises(
        UserError, match="up_proj.weight holds F8_E.*, but a floating-point dtype is expected: F64, F32"
    ):
        check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), tied_head=False)


@pytest.mark.parametrize("name", ["gptq-sym", "awq", "fp8"])
def test_expert_too_few_is_named(tmp_path, name):
    directory = make_checkpoint(tmp_path / "model", "qwen3-moe")
    tensors = write_published(directory, tmp_path / "twin", PUBLISHED[name])
    last = max(int(tensor.split(".experts.")[1].split(".")[0]) for tensor in tensors if ".experts." in tensor)
    lost = f"model.layers.2.mlp.experts.{last}.down_proj."
    kept = {tensor: value for tensor, value in tensors.items() if not tensor.startswith(lost)}
    assert len(kept) < len(tensors)
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    config = load_config(directory)
    with torch.device("meta"):
        model = model_of(config, names=model_class(config).names)
    with pytest.raises(UserError, match=rf"no tensor {lost}\w+ of shape \[.*; is the checkpoint complete\?") as error:
        check_checkpoint(model, open_model(directory).open_weights(), tied_head=False)
    assert "\n" not in str(error.value)


def test_plain_file_in_a_quantised_checkpoint_is_named(checkpoints, tmp_path):
    directory, twin = checkpoints("gptq-sym")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(load_file(twin / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model.layers.0.self_attn.q_proj.weight is not quantized, but quantization_config"
    ):
        load(tmp_path)
