"""Loading: every slice from its tensor, every byte counted, strict both ways."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_llama import load, model_of, plain_slices, write

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config
from labinfer.weights import tensor_files
from labinfer.weights.loader import check_checkpoint, load_weights, weight_bytes
from labinfer.weights.model_files import open_model
from labinfer.weights.weighted_module import WeightedModule

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gap_is_too_short(monkeypatch):
    """Rows of tiny matrices would be read as a whole."""
    monkeypatch.setattr(tensor_files, "SHORTEST_GAP", 1)


# Reading.


def test_every_parameter_is_filled_from_its_tensor(tmp_path):
    directory, tensors = write(tmp_path)
    model, checkpoint = load(directory)
    attention = model.model.layers["1"].self_attn
    names = [f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkv"]
    assert torch.equal(attention.qkv_proj.packed.data, torch.cat([tensors[name] for name in names]))
    assert torch.equal(model.lm_head.packed.data, tensors["lm_head.weight"])
    assert set(tensors) == checkpoint.names
    check_checkpoint(model_of(load_config(directory)), checkpoint, tied_head=False)


def test_values_are_converted_to_the_parameters_type(tmp_path):
    directory, tensors = write(tmp_path)
    model, _ = load(directory, dtype=torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"].bfloat16())


def test_progress_counts_bytes_to_the_end(tmp_path):
    directory, tensors = write(tmp_path)
    seen = []
    load_weights(
        model_of(load_config(directory)), open_model(directory).open_weights(), CPU, lambda *counts: seen.append(counts)
    )
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert len(seen) == len(tensors) + 1 and seen == sorted(seen)
    assert seen[0] == (0, total) and seen[-1] == (total, total)


class Kept(dict):
    """Packed weights in memory, instead of in files."""

    def open(self, slices, functions):
        return dict(self)

    def keep(self, slices, states, functions):
        raise AssertionError("all states were there")


def test_progress_is_not_told_if_every_module_is_in_the_cache(tmp_path):
    directory, tensors = write(tmp_path)
    loaded, _ = load(directory)
    modules = {name: part for name, part in loaded.named_modules() if isinstance(part, WeightedModule)}
    kept = Kept({name: module.export_packed() for name, module in modules.items()})
    assert kept and None not in kept.values()
    seen, again = [], model_of(load_config(directory))
    load_weights(again, open_model(directory).open_weights(), CPU, lambda *counts: seen.append(counts), kept)
    assert seen == []
    assert torch.equal(again.model.norm.weight, tensors["model.norm.weight"])


def test_one_rank_reads_every_byte_once(tmp_path):
    directory, tensors = write(tmp_path)
    model, checkpoint = load(directory)
    assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in tensors.values()) == weight_bytes(model)


def test_tied_head_is_read_once(tmp_path):
    directory, tensors = write(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    model, checkpoint = load(directory)
    assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    assert model.lm_head is model.model.embed_tokens


def test_tp_ranks_together_read_everything_once_and_the_norms_each(tmp_path):
    directory, tensors = write(tmp_path)
    shares = [load(directory, tp_rank=rank, tp_size=2) for rank in range(2)]
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(checkpoint.bytes_read for _, checkpoint in shares) == total + norms
    assert all(checkpoint.bytes_read == weight_bytes(model) < total for model, checkpoint in shares)


def test_replicated_kv_heads_are_read_by_each_of_their_ranks(tmp_path):
    directory, tensors = write(tmp_path)
    read = sum(load(directory, tp_rank=rank, tp_size=3)[1].bytes_read for rank in range(3))
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    one_head = 2 * 2 * 8 * 48 * 4  # layers, keys and values, head size, hidden size, bytes
    # 6 query heads over 3 ranks in pairs; of 2 KV heads the ranks read 1, 2 and 1.
    assert read == sum(tensor.nbytes for tensor in tensors.values()) + 2 * norms + 2 * one_head


def test_stages_together_read_everything_once(tmp_path):
    directory, tensors = write(tmp_path)
    read = [load(directory, layers=layers)[1].bytes_read for layers in ((0, 1), (1, 2))]
    assert sum(read) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tp_size", [2, 3, 5])
def test_slices_count_as_many_bytes_as_they_have(tmp_path, tp_size):
    directory, _ = write(tmp_path)
    for rank in range(tp_size):
        share = {"tp_rank": rank, "tp_size": tp_size}
        _, checkpoint = load(directory, **share)
        expected = 0
        for part in plain_slices(model_of(load_config(directory), **share)):
            cut = [end - begin for begin, end in part.ranges]
            shape = [*cut, *part.shape[len(cut) :]]
            assert tuple(part.destination.shape) == tuple(shape)
            expected += math.prod(shape) * 4
        assert checkpoint.bytes_read == expected


# Strictness.


def test_missing_tensor_is_named(tmp_path):
    directory, tensors = write(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write(tmp_path, tensors)
    with pytest.raises(UserError, match=r"no tensor model.layers.1.mlp.up_proj.weight of shape \[64, 48\]"):
        load(directory)


def test_extra_tensor_is_named(tmp_path):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8), "zzz": torch.ones(1)})
    with pytest.raises(UserError, match=r"has tensor model.layers.0.self_attn.q_norm.weight and 1 more"):
        check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), tied_head=False)


def test_layers_beyond_the_configs_count_are_left_over(tmp_path):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors, num_hidden_layers=1)
    with pytest.raises(UserError, match=r"model.layers.1"):
        check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), tied_head=False)


def test_computed_frequencies_and_a_repeated_tied_head_are_passed_over(tmp_path):
    directory, tensors = write(tmp_path, tie_word_embeddings=True)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    write(tmp_path, tensors | extra, tie_word_embeddings=True)
    model = model_of(load_config(directory))
    check_checkpoint(model, open_model(directory).open_weights(), tied_head=True)
    with pytest.raises(UserError, match="lm_head.weight"):
        check_checkpoint(model, open_model(directory).open_weights(), tied_head=False)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (47,)),
        ("model.norm.weight", (1, 48)),
        ("model.norm.weight", ()),
        ("model.embed_tokens.weight", (49, 48)),
        ("model.layers.0.mlp.down_proj.weight", (64, 48)),
    ],
)
def test_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path, name, shape):
    directory, tensors = write(tmp_path)
    wanted = list(tensors[name].shape)
    write(tmp_path, tensors | {name: torch.ones(shape)})
    with pytest.raises(UserError) as caught:
        load(directory)
    text = str(caught.value)
    assert name in text and str(list(shape)) in text and str(wanted) in text


def test_whole_numbers_are_taken_for_quantised_weights_and_refused(tmp_path):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors | {"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(UserError, match="holds I8, but a floating-point"):
        load(directory)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, name, value):
    directory, tensors = write(tmp_path)
    tensors[name].view(-1)[-1] = value
    with pytest.raises(UserError, match=f"{name.removesuffix('.weight')}.* contains {value} "):
        load(write(tmp_path, tensors)[0])


LAYER = "model.layers.1"
BUFFERS = {
    f"{LAYER}.self_attn.rotary_emb.inv_freq": (4,),
    f"{LAYER}.self_attn.rotary_emb.cos_cached": (1, 1, 64, 8),
    f"{LAYER}.self_attn.rotary_emb.sin_cached": (1, 1, 64, 8),
    "model.rotary_emb.inv_freq": (4,),
    f"{LAYER}.self_attn.k_scale": (1,),
    f"{LAYER}.self_attn.k_proj.k_scale": (),
    f"{LAYER}.self_attn.attn.v_scale": (1,),
    f"{LAYER}.self_attn.attn.q_scale": (1,),
    f"{LAYER}.self_attn.kv_scale": (1,),
    f"{LAYER}.self_attn.qkv_proj.kv_scale": (1,),
    f"{LAYER}.self_attn.k_proj.output_scale": (1,),
    f"{LAYER}.self_attn.v_proj.output_scale": (),
    f"{LAYER}.attn.bias": (1, 1, 64, 64),
    f"{LAYER}.self_attn.attn.masked_bias": (),
}


def test_buffers_of_old_exports_and_scales_of_kv_caches_are_passed_over(tmp_path):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors | {name: torch.ones(shape) for name, shape in BUFFERS.items()})
    check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), tied_head=False)


@pytest.mark.parametrize(
    ("name", "shape"), [("attn.bias", (48,)), ("mlp.output_scale", (48,)), ("self_attn.scale", (1,))]
)
def test_tensor_that_could_change_answers_is_no_buffer(tmp_path, name, shape):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors | {f"{LAYER}.{name}": torch.ones(shape)})
    with pytest.raises(UserError, match=rf"{LAYER}.{name}, which .* add --ignore-tensors '{LAYER}.{name}'"):
        check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), tied_head=False)


def test_ignored_tensors_are_named_in_one_line_and_others_still_refused(tmp_path, caplog):
    directory, tensors = write(tmp_path)
    write(tmp_path, tensors | {name: torch.ones(3) for name in ("aux.a", "aux.b", "rest")})
    model, checkpoint = model_of(load_config(directory)), open_model(directory).open_weights()
    with pytest.raises(UserError, match="has tensor rest, which"):
        check_checkpoint(model, checkpoint, False, ("aux.*",))
    caplog.clear()
    with caplog.at_level("INFO"):
        check_checkpoint(model, checkpoint, False, ("aux.*", "re?t"))
    assert caplog.messages == ["--ignore-tensors: 3 tensors are not loaded: aux.a, aux.b, rest"]


def test_tensor_that_the_model_needs_cannot_be_ignored(tmp_path):
    directory, _ = write(tmp_path)
    with pytest.raises(UserError, match="--ignore-tensors matches lm_head.weight, which the model needs"):
        check_checkpoint(model_of(load_config(directory)), open_model(directory).open_weights(), False, ("lm_*",))
