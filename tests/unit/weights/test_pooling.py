"""The pooling of a checkpoint: what its files say is obeyed, or refused by name."""

from __future__ import annotations

import json

import pytest
from checkpoints import make_checkpoint
from embedders import write_modules
from gguf import GGUFWriter, PoolingType
from gguf_files import write_gguf

from labinfer.base.errors import UserError
from labinfer.base.pooling import PoolingConfig
from labinfer.models.registry import load_config
from labinfer.requests.scoring import check_cosines
from labinfer.weights.hugging_face.pooling import read_pooling


def test_files_that_say_nothing_leave_the_last_token_normalized(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen3")
    assert read_pooling(directory) is None
    assert load_config(directory).pooling == PoolingConfig(pooling="last", normalize=True, is_embedder=False)
    values = json.loads((directory / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (directory / "config.json").write_text(json.dumps(values))
    assert load_config(directory).pooling == PoolingConfig(pooling="last", normalize=True, is_embedder=True)


@pytest.mark.parametrize("wrong", [[0], [73], ["8"], [True]])
def test_lengths_of_cut_vectors_are_those_of_the_config(tmp_path, wrong):
    directory = make_checkpoint(tmp_path, "qwen3")
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"matryoshka_dimensions": [8, 32]}))
    assert load_config(directory).pooling.matryoshka_dimensions == (8, 32)
    (directory / "config.json").write_text(json.dumps(values | {"matryoshka_dimensions": wrong}))
    with pytest.raises(UserError, match="matryoshka_dimensions should be numbers from 1 to 72, not"):
        load_config(directory)


@pytest.mark.parametrize("old", [True, False])
def test_several_modes_are_refused(tmp_path, old):
    config = read_pooling(write_modules(tmp_path, ["mean", "max"], old=old))
    assert "mean" in config.refusal and "max" in config.refusal and not config.is_embedder


def test_mode_that_is_left_out_is_the_mean(tmp_path):
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 8}')
    assert read_pooling(tmp_path).pooling == "mean"


@pytest.mark.parametrize("mode", ["weightedmean", "mean_sqrt_len_tokens", "whatever", 5])
def test_other_modes_are_refused_by_name(tmp_path, mode):
    assert f"asks for pooling {mode}" in read_pooling(write_modules(tmp_path, mode, old=False)).refusal


def test_mode_that_is_no_name_is_refused(tmp_path):
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": [{"mean": true}]}')
    assert "asks for pooling {'mean': True}" in read_pooling(tmp_path).refusal


@pytest.mark.parametrize(("mode", "is_refused"), [("mean", True), ("cls", True), ("lasttoken", False)])
def test_prompt_that_is_left_out_is_refused_where_it_matters(tmp_path, mode, is_refused):
    config = read_pooling(write_modules(tmp_path, mode, include_prompt=False))
    assert ("asks for include_prompt false" in config.refusal) == is_refused


@pytest.mark.parametrize(
    "kinds", [["Transformer", "Pooling", "Dense"], ["Transformer", "LogitScore"], ["Transformer"], []]
)
def test_other_modules_are_refused_by_name(tmp_path, kinds):
    write_modules(tmp_path)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    config = read_pooling(tmp_path)
    assert f"asks for {', '.join(kinds)}; supported are Transformer, Pooling, Normalize" in config.refusal
    with pytest.raises(UserError, match="pooling: .*modules.json asks for"):
        check_cosines(config, None)
    check_cosines(config, "last")


def test_settings_of_modules_that_change_vectors_are_refused(tmp_path):
    write_modules(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": true}')
    assert "asks for do_lower_case True" in read_pooling(tmp_path).refusal
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}')
    assert not read_pooling(tmp_path).refusal
    (tmp_path / "2_Normalize").mkdir()
    (tmp_path / "2_Normalize" / "config.json").write_text('{"module_input_name": "token_embeddings"}')
    assert "asks for module_input_name" in read_pooling(tmp_path).refusal


def test_prompt_that_sentence_transformers_would_put_first_is_told(tmp_path):
    write_modules(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"default_prompt_name": null}')
    assert not read_pooling(tmp_path).warning
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"default_prompt_name": "query", "prompts": {"query": "Q: "}}'
    )
    assert "'query' before every text" in read_pooling(tmp_path).warning
    assert read_pooling(tmp_path).prompts == {"query": "Q: "}
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": 5}}')
    with pytest.raises(UserError, match="prompts should be texts by name, not {'query': 5}"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (0, PoolingConfig()),
        (1, PoolingConfig(pooling="mean", is_embedder=True)),
        (2, PoolingConfig(pooling="cls", is_embedder=True)),
        (3, PoolingConfig(is_embedder=True)),
        (4, "reranker"),
    ],
)
def test_gguf_file_says_its_pooling_by_a_number(tmp_path, monkeypatch, kind, expected):
    finish = GGUFWriter.write_header_to_file
    monkeypatch.setattr(
        GGUFWriter,
        "write_header_to_file",
        lambda self, *args: (self.add_pooling_type(PoolingType(kind)), finish(self, *args)),
    )
    config = load_config(write_gguf(make_checkpoint(tmp_path, "qwen3"), tmp_path / "qwen3.gguf")).pooling
    assert config == expected if isinstance(expected, PoolingConfig) else expected in config.refusal


@pytest.mark.parametrize("is_causal", [True, False])
def test_gguf_file_says_whether_it_is_causal(tmp_path, monkeypatch, is_causal):
    finish = GGUFWriter.write_header_to_file
    monkeypatch.setattr(
        GGUFWriter,
        "write_header_to_file",
        lambda self, *args: (self.add_causal_attention(is_causal), finish(self, *args)),
    )
    config = load_config(write_gguf(make_checkpoint(tmp_path, "qwen3"), tmp_path / "qwen3.gguf"))
    assert (config.is_causal, config.pooling.is_embedder) == (is_causal, not is_causal)


def test_causal_model_has_no_scores_unless_a_pooling_is_named():
    with pytest.raises(UserError, match="pooling: this model is not an embedding model"):
        check_cosines(PoolingConfig(), None)
    check_cosines(PoolingConfig(), "mean")
    check_cosines(PoolingConfig(is_embedder=True), None)
