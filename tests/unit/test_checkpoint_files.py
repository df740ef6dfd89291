"""Files of a checkpoint: found by index or name, and said by path where they are broken."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import load, write

from labinfer.errors import UserError
from labinfer.weights.checkpoint import Checkpoint
from labinfer.weights.files import INDEX_FILE


def test_a_directory_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="only safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x05", b"\xff" * 64, (10).to_bytes(8, "little") + b'{"a": nope', (2**40).to_bytes(8, "little") + b"{}"],
)
def test_a_broken_header_is_refused_by_path(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"model.safetensors is not a valid safetensors file .* download it again"):
        Checkpoint(tmp_path)


def test_a_truncated_file_is_refused_by_path(tmp_path):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors is not a valid safetensors file"):
        Checkpoint(tmp_path)


def shard(directory, tensors, **shards):
    """Write ``tensors`` into two files with an index; ``shards`` replaces what the index says."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, directory / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map} | shards))


def test_shards_are_found_by_their_index(tmp_path):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    model, checkpoint = load(directory)
    assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])


def test_shards_without_an_index_are_found_too(tmp_path):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    (directory / INDEX_FILE).unlink()
    assert Checkpoint(directory).names == set(tensors)


def test_a_missing_shard_is_named(tmp_path):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    (directory / "part-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"part-2.safetensors is missing; is the checkpoint complete"):
        Checkpoint(directory)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    save_file(tensors, directory / "part-2.safetensors")
    with pytest.raises(UserError, match=r"both in part-1.safetensors and in part-2.safetensors"):
        Checkpoint(directory)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        "model.safetensors",
        {"a": "../model.safetensors"},
        {"a": "/etc/passwd"},
        {"a": 5},
        {"a": ["b"]},
        {"a": 5, "b": "c"},
    ],
)
def test_an_index_that_makes_no_sense_is_refused_by_path(tmp_path, weight_map):
    directory, tensors = write(tmp_path)
    shard(directory, tensors, weight_map=weight_map)
    with pytest.raises(UserError, match=f"{INDEX_FILE}.*weight_map"):
        Checkpoint(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": '])
def test_an_index_that_is_no_json_object_is_refused_by_path(tmp_path, text):
    write(tmp_path)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(UserError, match=INDEX_FILE):
        Checkpoint(tmp_path)
