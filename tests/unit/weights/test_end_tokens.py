"""Tokens that end an answer: from a directory's configs and its tokenizer, and from a GGUF file."""

from __future__ import annotations

import json
import shutil

import pytest
from checkpoints import make_checkpoint, write_tokenizer
from gguf_files import write_gguf
from transformers import AutoTokenizer

from labinfer import LLM
from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.models.registry import load_config
from labinfer.weights.model_files import open_model

TURN, TEXT = "<|im_end|>", "<|endoftext|>"
"""Ids 1 and 0 of the tokenizer that tests have."""


def write_configs(directory, generation=None, tokenizer=None, special=None):
    """The tests' tokenizer with another ``tokenizer_config.json``, ``special_tokens_map.json`` and ``generation_config.json``."""
    write_tokenizer(directory)
    files = {"generation_config": generation, "tokenizer_config": tokenizer or {}, "special_tokens_map": special}
    for name, values in files.items():
        if values is not None:
            (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("config", "generation", "configured"),
    [
        ({}, None, ()),
        ({}, {"eos_token_id": []}, ()),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, {"do_sample": True}, (7, 8)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": None}, (7, 8)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": []}, (7, 8)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": [None]}, (7, 8)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": 0}, {"eos_token_id": [1, 9]}, (1, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": -1}, None, ()),
        ({"eos_token_id": [7, -1]}, {"eos_token_id": -1}, (7,)),
    ],
)
@pytest.mark.parametrize(
    ("own", "own_id"), [({"eos_token": TURN}, (1,)), ({"eos_token": {"content": TEXT}}, (0,)), ({}, ())]
)
def test_end_tokens_are_those_of_the_configs_and_the_tokenizers_own(
    tmp_path, config, generation, configured, own, own_id
):
    write_configs(tmp_path, generation, own)
    assert open_model(tmp_path).end_ids(config) == tuple(dict.fromkeys(configured + own_id))


@pytest.mark.parametrize(
    ("tokenizer", "special", "end"),
    [
        ({"eos_token": TURN, "added_tokens_decoder": {"5": {"content": TURN}}}, None, (5,)),
        ({"eos_token": TURN, "added_tokens_decoder": {"5": {"content": TEXT}}}, None, (1,)),
        ({}, {"eos_token": {"content": TURN}}, (1,)),
        ({"eos_token": TEXT}, {"eos_token": TURN}, (0,)),
        ({"eos_token": None}, {"eos_token": TURN}, ()),
        ({"eos_token": "nowhere"}, None, ()),
        ({"eos_token": "a"}, None, "a"),
    ],
    ids=["by id", "by file", "map", "config over map", "null", "unknown", "plain token"],
)
def test_end_token_of_a_tokenizer_is_found_in_its_files(tmp_path, tokenizer, special, end):
    write_configs(tmp_path, tokenizer=tokenizer, special=special)
    if end == "a":
        end = (AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("a"),)
    assert open_model(tmp_path).end_ids({}) == end


def test_directory_without_a_tokenizer_has_the_ends_of_its_configs(tmp_path):
    assert open_model(tmp_path).end_ids({"eos_token_id": 2}) == (2,)


@pytest.mark.parametrize("tokenizer", [None, {"eos_token": "</s>"}, {"eos_token": "<end>"}, {"eos_token": "unknown"}])
def test_end_token_of_sentencepiece_is_found(sp_directory, tmp_path, tokenizer):
    from sentencepiece import SentencePieceProcessor

    shutil.copy(sp_directory / "tokenizer.model", tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": 777}))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    own = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).eos_id()
    ends = {"</s>": (own,), "<end>": (777,), "unknown": ()}
    assert open_model(tmp_path).end_ids({}) == (ends[tokenizer["eos_token"]] if tokenizer else (own,))


@pytest.mark.parametrize("text", ["{", '{"added_tokens": 3}', '{"added_tokens": [], "model": {"vocab": 3}}'])
def test_broken_tokenizer_is_one_line(tmp_path, text):
    write_configs(tmp_path, tokenizer={"eos_token": TURN})
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="tokenizer.json is not a valid tokenizer: [^\n]+$"):
        open_model(tmp_path).end_ids({})


def test_directory_and_gguf_file_end_answers_at_the_tokenizers_end_of_turn(tmp_path):
    directory = make_checkpoint(tmp_path / "directory", "qwen2-tied")
    prompts = [{"prompt_token_ids": [40, 41, 42]}]
    sampling = {"temperature": 0, "max_tokens": 16}
    with LLM(str(directory), num_kv_blocks=64, dtype="float32") as llm:
        whole = llm.generate(prompts, SamplingParams(**sampling, ignore_eos=True))[0].token_ids
    tokenizer = AutoTokenizer.from_pretrained(directory)
    end = next(token for token in whole[2:] if 2 < token < len(tokenizer))
    swap_tokens(directory, tokenizer.convert_ids_to_tokens(end), TURN)
    values = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    gguf = write_gguf(directory, tmp_path / "model.gguf")
    assert set(load_config(directory).eos_token_ids) == {0, end}
    assert end in load_config(gguf).eos_token_ids
    for model in (directory, gguf):
        with LLM(str(model), num_kv_blocks=64, dtype="float32") as llm:
            output = llm.generate(prompts, SamplingParams(**sampling))[0]
        assert (output.finish_reason, output.token_ids[-1]) == ("stop", end), model
        assert output.token_ids == whole[: whole.index(end) + 1]


def swap_tokens(directory, *texts):
    """Two tokens of ``tokenizer.json`` with each other's ids."""
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    vocab = values["model"]["vocab"]
    first, second = texts
    vocab[first], vocab[second] = vocab[second], vocab[first]
    for token in values["added_tokens"]:
        token["id"] = vocab[token["content"]]
    path.write_text(json.dumps(values))
