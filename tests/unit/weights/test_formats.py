"""Formats of matrices: found by quantization_config, decoded slice by slice, strict both ways; names that families give."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import load, model_of, write
from toy_format import write_toy

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.loader import check_checkpoint, weight_slices
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import TensorSlice

EXCLUDED = ["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
"""One of three merged projections among them."""
SHARES = [
    {"tp_rank": rank, "tp_size": size, "layers": layers}
    for size in (1, 2, 3, 5)
    for rank in range(size)
    for layers in (None, (0, 1), (1, 2))
]
FUSED = CheckpointNames(fused={("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"})


@pytest.fixture
def toy(tmp_path):
    """(quantised checkpoint, plain checkpoint of the same values, the first one's tensors)."""
    directory, twin = tmp_path / "toy", tmp_path / "plain"
    directory.mkdir()
    write(directory)
    return directory, twin, write_toy(directory, twin, EXCLUDED)


def assert_same_weights(model, other) -> None:
    weights, others = packed_weights(model), packed_weights(other)
    assert weights.keys() == others.keys() and weights
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def packed_weights(model) -> dict[str, torch.Tensor]:
    packed = {name: module.packed.data for name, module in model.named_modules() if hasattr(module, "packed")}
    return packed | dict(model.named_parameters())


# Formats.


@pytest.mark.parametrize("share", SHARES)
def test_quantised_slices_are_decoded_where_they_belong(toy, share):
    directory, twin, _ = toy
    model, checkpoint = load(directory, **share)
    plain_model, plain_checkpoint = load(twin, **share)
    assert_same_weights(model, plain_model)
    assert checkpoint.bytes_read < plain_checkpoint.bytes_read


def test_quantised_tensors_are_all_expected(toy):
    directory, _, tensors = toy
    model, checkpoint = model_of(load_config(directory)), open_model(directory).open_weights()
    check_checkpoint(model, checkpoint, tied_head=False)
    assert {name for part in weight_slices(model) for name in checkpoint.tensor_names(part)} == set(tensors)


@pytest.mark.parametrize("extra", ["lm_head.codes", "model.layers.0.self_attn.q_proj.weight"])
def test_tensors_of_another_format_are_left_over(toy, extra):
    directory, _, tensors = toy
    save_file(tensors | {extra: torch.ones(1)}, directory / "model.safetensors")
    with pytest.raises(UserError, match=f"has tensor {extra}, which"):
        check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), tied_head=False)


SCALES = "model.layers.1.self_attn.v_proj.row_scale"


@pytest.mark.parametrize(
    ("scales", "complaint"),
    [
        (None, rf"no tensor {SCALES} of shape \[16\]"),
        (torch.ones(15), rf"{SCALES} has shape \[15\].*\[16\]"),
        (torch.ones(16, dtype=torch.uint8), f"{SCALES} holds U8, but a floating-point dtype is expected"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(toy, scales, complaint):
    directory, _, tensors = toy
    kept = {name: tensor for name, tensor in tensors.items() if name != SCALES}
    save_file(kept if scales is None else kept | {SCALES: scales}, directory / "model.safetensors")
    with pytest.raises(UserError, match=complaint):
        load(directory)


def test_codes_of_another_dtype_are_refused_by_name(toy):
    directory, _, tensors = toy
    codes = "model.layers.1.self_attn.v_proj.codes"
    save_file(tensors | {codes: tensors[codes].float()}, directory / "model.safetensors")
    with pytest.raises(UserError, match=f"{codes} holds F32, not torch.int8"):
        load(directory)


@pytest.mark.parametrize(
    ("quantization_config", "complaint"),
    [
        ({"quant_method": "quip", "bits": 4}, "quant_method 'quip', which is not supported"),
        ({"bits": 4}, "quant_method None, which is not supported"),
        ("gptq", "quant_method None, which is not supported"),
        ({"quant_method": ["gptq"]}, r"quant_method \['gptq'\], which is not supported"),
    ],
)
def test_quantisations_nobody_can_read_are_refused_by_method(tmp_path, quantization_config, complaint):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors, quantization_config=quantization_config)
    for read in (load_config, lambda directory: open_model(directory).open_weights()):
        with pytest.raises(UserError, match=f"config.json: quantization_config has {complaint}.*--quantization int8"):
            read(directory)


def test_config_without_quantisation_may_say_so(tmp_path):
    directory, _ = write(tmp_path, quantization_config=None)
    load(directory)


# Names.


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with merged projections as one each."""
    fused = dict(tensors)
    for name in tensors:
        for parts, whole in FUSED.fused.items():
            parent, _, kind = name.partition(f".{parts[0]}.")
            if kind:
                fused[f"{parent}.{whole}.{kind}"] = torch.cat([fused.pop(f"{parent}.{part}.{kind}") for part in parts])
    return fused


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("biased", [False, True])
def test_fused_projections_are_cut_like_those_apart(tmp_path, share, biased):
    biases = {"attention_bias": biased, "mlp_bias": biased}
    directory, tensors = write(tmp_path, **biases)
    apart, read_apart = load(directory, **share)
    fused_tensors = fuse(tensors)
    assert len(fused_tensors) == len(tensors) - 2 * 3 * (1 + biased)
    write(tmp_path, fused_tensors, **biases)
    fused, read_fused = load(directory, names=FUSED, **share)
    assert_same_weights(fused, apart)
    assert read_fused.bytes_read == read_apart.bytes_read
    check_checkpoint(model_of(load_config(directory), names=FUSED), read_fused, tied_head=False)


def test_fused_projections_may_be_quantised(tmp_path):
    directory, twin = tmp_path / "toy", tmp_path / "plain"
    directory.mkdir()
    _, tensors = write(directory)
    write(directory, fuse(tensors))
    write_toy(directory, twin, excluded=["model.layers.0.self_attn.qkv_proj"])
    for rank in range(3):
        share = {"names": FUSED, "tp_rank": rank, "tp_size": 3}
        assert_same_weights(load(directory, **share)[0], load(twin, **share)[0])


def test_family_that_stores_projections_apart_does_not_find_them_fused(tmp_path):
    directory, tensors = write(tmp_path)
    write(tmp_path, fuse(tensors))
    with pytest.raises(UserError, match=r"no tensor model.layers.0.self_attn.q_proj.weight of shape \[48, 48\]"):
        load(directory)


@pytest.mark.parametrize(
    ("renamed", "name", "stored"),
    [
        ({}, "model.norm.weight", "model.norm.weight"),
        ({"model": "model.language_model"}, "model.norm.weight", "model.language_model.norm.weight"),
        ({"norm": "final"}, "model.norm.weight", "model.final.weight"),
        ({"norm": "final"}, "model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ({"norm": "final"}, "model.layers.0.norm_1.weight", "model.layers.0.norm_1.weight"),
        ({"a.b": "c"}, "a.bb", "a.bb"),
        ({"self_attn": "attention"}, "model.layers.1.self_attn.q_proj", "model.layers.1.attention.q_proj"),
        ({"self_attn": "mixer", "self_attn.o_proj": "self_attn.dense"}, "1.self_attn.o_proj", "1.self_attn.dense"),
        ({"lm_head": "embed_tokens", "embed_tokens": "lm_head"}, "lm_head", "embed_tokens"),
    ],
)
def test_renamed_paths_replace_whole_segments_once(renamed, name, stored):
    assert CheckpointNames(renamed=renamed).stored(name) == stored


def test_tensors_under_a_familys_names_are_found(tmp_path):
    directory, tensors = write(tmp_path)
    names = CheckpointNames(renamed={"model": "model.language_model", "mlp.down_proj": "mlp.dense_4h_to_h"})
    expected, _ = load(directory)

    def stored(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1).replace("mlp.down_proj", "mlp.dense_4h_to_h")

    write(tmp_path, {stored(name): tensor for name, tensor in tensors.items()})
    model, checkpoint = load(directory, names=names)
    assert_same_weights(model, expected)
    check_checkpoint(model_of(load_config(directory), names=names), checkpoint, tied_head=False)


# Slices.


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16])
def test_slice_is_cut_in_all_dimensions(tmp_path, dtype):
    tensor = torch.arange(4 * 6 * 5).reshape(4, 6, 5).to(dtype)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    checkpoint = open_model(tmp_path).open_weights()
    for ranges in [(), ((1, 2),), ((2, 4), (0, 3)), ((0, 4), (2, 2)), ((1, 3), (1, 6), (4, 5))]:
        expected = tensor[tuple(slice(*cut) for cut in ranges)]
        assert torch.equal(checkpoint.read("t", (4, 6, 5), ranges, dtype), expected), ranges


def test_integer_is_not_read_into_another_dtype(tmp_path):
    save_file({"t": torch.ones(3, dtype=torch.int32)}, tmp_path / "model.safetensors")
    for dtype in (torch.int8, torch.int64):
        with pytest.raises(UserError, match="t holds I32, not torch.int"):
            open_model(tmp_path).open_weights().read_into(
                TensorSlice(name="t", shape=(3,), destination=torch.ones(3, dtype=dtype))
            )
