"""Rope's inverse frequencies and tables equal Transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import HunYuanDenseV1Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from labinfer.models.layers.rope import COVERED_AT_ONCE, ROPE_TYPES, RopeConfig, RotaryTable, inverse_frequencies

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 short": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn factor": YARN | {"attention_factor": 1.25},
    "yarn no stretch": YARN | {"factor": 1.0},
    "yarn own context": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    "yarn mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn untruncated": YARN | {"truncate": False},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "proportional stretched": {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "factor": 8.0,
    },
}


def config_of(parameters: dict, head_size: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        num_hidden_layers=1,
        head_dim=head_size,
        max_position_embeddings=32768,
        rope_parameters=dict(parameters),
    )


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_inverse_frequencies_are_those_of_transformers(name, head_size):
    parameters = PARAMETERS[name]
    config = config_of(parameters, head_size)
    if parameters["rope_type"] == "default":  # Transformers 5 keeps this one in the models
        theirs = LlamaRotaryEmbedding(config)
        expected, factor = theirs.inv_freq, theirs.attention_scaling
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    ours, our_factor = inverse_frequencies(head_size, parameters, config.max_position_embeddings)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", PARAMETERS)
def test_tables_are_those_of_transformers(name):
    parameters, positions = PARAMETERS[name], torch.tensor([0, 1, 17, 255])
    theirs = LlamaRotaryEmbedding(config_of(parameters, 64))
    expected = theirs(torch.zeros(1), positions.unsqueeze(0))
    ours = RotaryTable(
        RopeConfig(dim=64, parameters=parameters, max_position=32768), 256, torch.float32, torch.device("cpu")
    ).at(positions)
    for mine, their in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, their[0], rtol=1e-5, atol=1e-5)


def test_table_grows_in_its_place_and_no_further_than_it_is_long():
    length, positions = (
        COVERED_AT_ONCE + 100,
        torch.tensor([0, COVERED_AT_ONCE - 1, COVERED_AT_ONCE, COVERED_AT_ONCE + 99]),
    )
    config = RopeConfig(dim=8, parameters=PARAMETERS["default"], max_position=32768)
    table = RotaryTable(config, length, torch.float32, torch.device("cpu"))
    before = table._cos_SR.data_ptr()
    table.cover(length)
    cos_TR, sin_TR = table.at(positions)
    frequencies_F, _ = inverse_frequencies(8, PARAMETERS["default"], 32768)
    angles_TR = torch.outer(positions.double(), frequencies_F.double()).repeat(1, 2)
    torch.testing.assert_close(cos_TR, angles_TR.cos().float(), rtol=0, atol=1e-3)  # float32 angles of some thousands
    torch.testing.assert_close(sin_TR, angles_TR.sin().float(), rtol=0, atol=1e-3)
    assert table._cos_SR.data_ptr() == before
    with pytest.raises(AssertionError, match="is asked for"):
        table.cover(length + 1)


@pytest.mark.parametrize("given", [{}, {"factor": 8.0}, {"attention_factor": 1.25}, {"factor": 1.0}], ids=str)
@pytest.mark.parametrize("length", [64, 65])
def test_longrope_is_that_of_transformers_up_to_its_original_length_and_beyond(given, length):
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        **factors,
        **given,
    }
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config_of(parameters, 16), "cpu", seq_len=length)
    ours, our_factor = inverse_frequencies(16, parameters, 32768, length)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


def test_dynamic_with_an_alpha_is_that_of_hunyuan():
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    theirs = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config(head_dim=16, rope_parameters=dict(parameters)))
    ours, our_factor = inverse_frequencies(16, parameters, 2048)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert our_factor == theirs.attention_scaling


def test_every_type_that_is_offered_is_compared():
    compared = {parameters["rope_type"] for parameters in PARAMETERS.values()} | {"longrope", "dynamic"}
    assert compared == set(ROPE_TYPES)
