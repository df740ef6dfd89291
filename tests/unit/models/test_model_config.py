"""``config.json`` of a checkpoint: what is read, both spellings of rope, and errors that name file and key."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_llama import CONFIG, model_of

from labinfer.base.errors import UserError
from labinfer.models.config import ModelConfig
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.layers.rope import inverse_frequencies
from labinfer.models.llama import LlamaForCausalLM
from labinfer.models.registry import load_config, model_class

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(directory, drop=(), **changes):
    values = {key: value for key, value in (CONFIG | changes).items() if key not in drop}
    (directory / "config.json").write_text(json.dumps(values))
    return load_config(directory)


def attention_in(config: ModelConfig) -> AttentionConfig:
    """The mixer that all layers share."""
    assert all(layer.mixer == config.layers[0].mixer for layer in config.layers)
    return config.layers[0].mixer


def test_llama_config_is_read(tmp_path):
    config = read(tmp_path)
    attention, mlp = attention_in(config), config.layers[0].mlp
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (6, 2, 8)
    assert not (attention.qkv_bias or attention.out_bias or mlp.bias or config.tied_embeddings)
    assert attention.rope.parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert model_class(config) is LlamaForCausalLM


def test_what_a_llama_config_leaves_out_has_transformers_defaults(tmp_path):
    config = read(tmp_path, drop=("num_key_value_heads", "rms_norm_eps", "max_position_embeddings"))
    assert (attention_in(config).num_kv_heads, config.norm_eps, config.max_position) == (6, 1e-6, 2048)


def test_head_size_of_its_own_is_kept(tmp_path):
    assert attention_in(read(tmp_path, head_dim=16)).head_size == 16


def test_llama_biases_come_with_the_config(tmp_path):
    config = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert attention_in(config).qkv_bias and attention_in(config).out_bias and config.layers[0].mlp.bias


def test_qwen2_has_biases_on_queries_keys_and_values_only(tmp_path):
    config = read(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=True)
    attention = attention_in(config)
    assert (attention.qkv_bias, attention.out_bias, config.layers[0].mlp.bias) == (True, False, False)


@pytest.mark.parametrize("spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}])
def test_number_type_has_two_spellings(tmp_path, spelling):
    assert read(tmp_path, **spelling).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 3]}, None, (2, 3)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": 2}, {"eos_token_id": [4, 5]}, (4, 5)),
        ({"eos_token_id": 2}, {"do_sample": True}, (2,)),
    ],
)
def test_end_of_sequence_ids_prefer_the_generation_config(tmp_path, config, generation, ids):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path, **config).eos_token_ids == ids


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            LLAMA3 | {"rope_theta": 5e5, "rope_type": "llama3"},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0},
        ),
    ],
    ids=["theta", "null", "linear", "llama3", "yarn"],
)
def test_both_spellings_of_rope_mean_the_same(tmp_path, old, new):
    configs = read(tmp_path, **old), read(tmp_path, rope_parameters=new)
    before, after = (attention_in(config).rope.parameters for config in configs)
    ours, theirs = (inverse_frequencies(64, parameters, 32768) for parameters in (before, after))
    assert ours[0].equal(theirs[0]) and ours[1] == theirs[1]
    assert {key: before[key] for key in new} == after


# Errors.

REQUIRED = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named_with_its_file(tmp_path, key):
    with pytest.raises(UserError, match=f"config.json has no '{key}'"):
        read(tmp_path, drop=(key,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "50"),
        ("vocab_size", 0),
        ("vocab_size", 50.5),
        ("hidden_size", -48),
        ("num_hidden_layers", True),
        ("num_hidden_layers", [2]),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**18),
        ("hidden_size", 2**30),
        ("head_dim", 10**9),
        ("num_attention_heads", 0),
        ("num_attention_heads", 10**9),
        ("rope_theta", 0),
        ("rope_theta", -10000.0),
        ("rope_theta", float("nan")),
        ("rope_theta", 10**400),
        ("rope_theta", float("inf")),
        ("rope_theta", "1e4"),
        ("num_key_value_heads", 4),
        ("num_key_value_heads", 0),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("dtype", ["float32"]),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("hidden_act", "gelu"),
        ("hidden_act", 5),
        ("architectures", []),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [5]),
        ("architectures", ["LlamaForCausalLM", "Qwen2ForCausalLM"]),
    ],
)
def test_value_that_makes_no_sense_is_named_with_its_file(tmp_path, key, value):
    with pytest.raises(UserError) as caught:
        read(tmp_path, **{key: value})
    assert "config.json" in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaForSequenceClassification", "ModernBertModel"])
def test_encoders_are_refused_with_the_reason(tmp_path, name):
    with pytest.raises(
        UserError, match=f"'{name}' is not supported: it is an encoder like BERT, and LABInfer runs dec"
    ):
        read(tmp_path, architectures=[name])


def test_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="'MambaForCausalLM' is not supported; .*; supported are Llama"):
        read(tmp_path, architectures=["MambaForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_sliding_window": "yes"}, "use_sliding_window should be bool"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be from 1 to [0-9]+, not 0"),
        ({"use_sliding_window": True, "sliding_window": "8"}, "sliding_window should be int"),
        ({"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers should be int"),
        ({"layer_types": ["full_attention"]}, "layer_types should be a list of 2 times"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types should be .* not .*chunked_attention"),
        ({"layer_types": "sliding_attention"}, "layer_types should be"),
        ({"layer_types": ["full_attention", ["x"]]}, "layer_types should be"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention, but no window: set",
        ),
    ],
)
def test_windows_that_make_no_sense_are_named_with_their_file(tmp_path, changes, complaint):
    with pytest.raises(UserError, match=f"config.json: {complaint}"):
        read(tmp_path, architectures=["Qwen2ForCausalLM"], **changes)


def test_llama_with_a_window_is_refused(tmp_path):
    """In Transformers its mask has none, but the cache of its ``generate`` has one: neither can be meant."""
    with pytest.raises(UserError, match="sliding_window 8 is not supported"):
        read(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    config = read(tmp_path, use_sliding_window=False, sliding_window=8, max_window_layers=0)
    assert [layer.mixer.window for layer in config.layers] == [0, 0]


def test_stage_has_the_windows_of_its_own_layers(tmp_path):
    config = read(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=3,
    )
    stages = [model_of(config, layers=layers).model.layers for layers in ((0, 2), (2, 4))]
    windows = {number: layer.self_attn.config.window for stage in stages for number, layer in stage.items()}
    assert windows == {"0": 0, "1": 0, "2": 0, "3": 8}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "dynamic"}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "linear", "factor": float("nan")}),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e-320}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}),
        ("rope_scaling", {"rope_type": ["linear"]}),
        ("rope_scaling", "linear"),
        ("rope_scaling", [2.0]),
        ("rope_theta", "large"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_rope_that_cannot_be_computed_is_a_user_error(tmp_path, key, value):
    """Whether the config's reader or the table's maker finds it, it is the user's to mend, not a traceback."""
    with pytest.raises(UserError, match="rope"):
        inverse_frequencies(8, attention_in(read(tmp_path, **{key: value})).rope.parameters, 64)


def test_su_is_an_old_name_of_longrope(tmp_path):
    given = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    named = [{"rope_type": "longrope"}, {"rope_type": "su"}, {"type": "su"}]
    ropes = [attention_in(read(tmp_path, rope_scaling=given | kind)).rope for kind in named]
    tables = [inverse_frequencies(8, rope.parameters, 64, length=40)[0] for rope in ropes]
    assert all(torch.equal(table, tables[0]) for table in tables)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"architectures"', "[" * 100_000, '{"a":' * 100_000])
def test_config_that_is_no_json_object_is_refused_by_path(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json"):
        load_config(tmp_path)


def test_config_that_is_no_text_is_refused_by_path(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="config.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", [["mistral"], {}, "pixtral"])
def test_text_part_of_another_kind_is_refused(tmp_path, kind):
    with pytest.raises(UserError, match="config.json.*model_type"):
        read(tmp_path, architectures=["Mistral3ForConditionalGeneration"], text_config={"model_type": kind})


def test_missing_config_is_refused_by_path(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*config.json: No such file"):
        load_config(tmp_path)
