"""Files of a checkpoint: found by index or name, and said by path where they are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import load, write

from labinfer.base.errors import UserError
from labinfer.functions.cpu.loading import CpuLoading
from labinfer.weights import tensor_files
from labinfer.weights.files import INDEX_FILE
from labinfer.weights.hugging_face.tensor_names import has_head
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import TensorSlice


def test_directory_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="--model takes a directory with safetensors files, or a GGUF file"):
        open_model(tmp_path).open_weights()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x05", b"\xff" * 64, (10).to_bytes(8, "little") + b'{"a": nope', (2**40).to_bytes(8, "little") + b"{}"],
)
def test_broken_header_is_refused_by_path(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"model.safetensors is not a valid safetensors file .* download it again"):
        open_model(tmp_path).open_weights()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX_FILE])
def test_named_pipe_is_refused_and_not_waited_for(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        open_model(tmp_path).open_weights()


def test_truncated_file_is_refused_by_path(tmp_path):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors is not a valid safetensors file"):
        open_model(tmp_path).open_weights()


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
    assert open_model(directory).open_weights().names == set(tensors)


def test_missing_shard_is_named(tmp_path):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    (directory / "part-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"part-2.safetensors is missing; is the checkpoint complete"):
        open_model(directory).open_weights()


@pytest.mark.parametrize("missing", [(), (1,), (1, 2)])
def test_single_file_goes_before_an_index_that_does_not_name_it(tmp_path, missing):
    """The index and its shards are of an earlier export; Transformers reads the single file, too."""
    directory, tensors = write(tmp_path)
    shard(directory, {name: tensor + 1 for name, tensor in tensors.items()})
    for number in missing:
        (directory / f"part-{number}.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors")
    model, checkpoint = load(directory)
    assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])


def test_shard_that_is_missing_beside_the_single_file_is_named_where_the_index_has_both(tmp_path):
    directory, tensors = write(tmp_path)
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {"mtp.fc.weight": "mtp.safetensors"}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"mtp.safetensors is missing; is the checkpoint complete"):
        open_model(directory).open_weights()


def test_tensor_in_two_files_is_refused(tmp_path):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    save_file(tensors, directory / "part-2.safetensors")
    with pytest.raises(UserError, match=r"both in part-1.safetensors and in part-2.safetensors"):
        open_model(directory).open_weights()


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
        {"a": "model\0.safetensors"},
    ],
)
def test_index_that_makes_no_sense_is_refused_by_path(tmp_path, weight_map):
    directory, tensors = write(tmp_path)
    shard(directory, tensors, weight_map=weight_map)
    with pytest.raises(UserError, match=f"{INDEX_FILE}.*weight_map"):
        open_model(directory).open_weights()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": '])
def test_index_that_is_no_json_object_is_refused_by_path(tmp_path, text):
    directory, tensors = write(tmp_path)
    shard(directory, tensors)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(UserError, match=INDEX_FILE):
        open_model(tmp_path).open_weights()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../part-1.safetensors"}}']
)
def test_single_file_goes_before_a_broken_index(tmp_path, text):
    directory, tensors = write(tmp_path)
    (directory / INDEX_FILE).write_text(text)
    assert open_model(directory).open_weights().names == set(tensors)
    assert has_head(directory) == any("lm_head" in name for name in tensors)


def test_broken_index_that_names_the_single_file_is_refused(tmp_path):
    directory, _ = write(tmp_path)
    (directory / INDEX_FILE).write_text('{"weight_map": {"a": "model.safetensors", "b": "../mtp.safetensors"}}')
    with pytest.raises(UserError, match=f"{INDEX_FILE}.*weight_map"):
        open_model(directory).open_weights()


STORED = torch.arange(14 * 6, dtype=torch.float32).reshape(14, 6)


@pytest.mark.pairwise
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "begin", "end"), [(0, 0, 14), (0, 3, 11), (0, 5, 5), (1, 0, 6), (1, 2, 5), (1, 3, 3)])
@pytest.mark.parametrize(("piece", "gap"), [(1, 1), (100, 1), (1 << 20, 1), (100, 1 << 20)])
def test_slice_is_read_whatever_its_type_and_in_whatever_pieces(
    tmp_path, monkeypatch, stored, wanted, dim, begin, end, piece, gap
):
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    monkeypatch.setattr(tensor_files, "SHORTEST_GAP", gap)
    save_file({"before": torch.ones(3, dtype=torch.uint8), "w": STORED.to(stored)}, tmp_path / "model.safetensors")
    expected = STORED[begin:end] if dim == 0 else STORED[:, begin:end]
    destination = torch.full(expected.shape, -1.0, dtype=wanted)
    checkpoint = open_model(tmp_path).open_weights()
    ranges = ((begin, end),) if dim == 0 else ((0, 14), (begin, end))
    checkpoint.read_into(TensorSlice(name="w", shape=(14, 6), ranges=ranges, destination=destination))
    assert torch.equal(destination, expected.to(wanted))
    if gap == 1:
        assert checkpoint.bytes_read == expected.numel() * stored.itemsize
    else:  # gaps are read through, but for an empty slice
        assert checkpoint.bytes_read == (14 if dim else end - begin) * 6 * stored.itemsize * (end > begin)


def test_destination_with_gaps_is_filled_and_its_gaps_are_not(tmp_path):
    save_file({"w": STORED}, tmp_path / "model.safetensors")
    whole = torch.zeros(14, 8)
    open_model(tmp_path).open_weights().read_into(TensorSlice(name="w", shape=(14, 6), destination=whole[:, 1:7]))
    assert torch.equal(whole[:, 1:7], STORED)
    assert not whole[:, [0, 7]].any()


@pytest.mark.parametrize(
    ("ranges", "num_bytes"),
    [
        (((0, 64), (0, 2048)), 64 * 8192),
        (((0, 64), (1024, 2048)), 64 * 4096),
        (((3, 60), (0, 10)), 57 * 40),
        (((0, 64), (40, 2048)), 64 * 8192),  # a gap that costs less than a call
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_bytes_that_count_are_those_that_the_system_read(
    tmp_path, compiled_functions, monkeypatch, ranges, num_bytes, is_compiled
):
    save_file({"w": torch.arange(64 * 2048, dtype=torch.float32).reshape(64, 2048)}, tmp_path / "model.safetensors")
    checkpoint = open_model(tmp_path).open_weights()
    if is_compiled:
        checkpoint.functions = CpuLoading(compiled_functions)

    def read_by_process() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar: by all calls, also from the cache

    before, overhead = read_by_process(), read_by_process()
    overhead -= before
    before = read_by_process()
    got = checkpoint.read("w", (64, 2048), ranges, torch.float32)
    assert read_by_process() - before - overhead == checkpoint.bytes_read == num_bytes
    (begin, end), (left, right) = ranges
    assert torch.equal(got, torch.arange(begin, end)[:, None] * 2048.0 + torch.arange(left, right))


def test_file_that_is_cut_short_after_it_was_opened_is_named(tmp_path):
    save_file({"w": STORED}, tmp_path / "model.safetensors")
    checkpoint = open_model(tmp_path).open_weights()
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(300)
    with pytest.raises(UserError, match=r"model.safetensors is truncated, or cannot be read"):
        checkpoint.read_into(TensorSlice(name="w", shape=(14, 6), destination=torch.empty(14, 6)))


def test_loading_does_not_count_the_file_beside_its_parameters(tmp_path):
    """A mapped file's pages would be this process's memory as long as it is open."""
    code = """
import sys, torch
from pathlib import Path
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import TensorSlice

def highest():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

destination = torch.zeros(64 << 20, dtype=torch.uint8).view(torch.bfloat16)
before = highest()
open_model(Path(sys.argv[1])).open_weights().read_into(TensorSlice(name="w", shape=(32 << 20,), destination=destination))
print(highest() - before)
assert destination[-1] == destination[0] == 1
"""
    save_file({"w": torch.ones(32 << 20, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 20
