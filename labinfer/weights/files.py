"""The files of a model's weights, by their names alone."""

from __future__ import annotations

from pathlib import Path

from labinfer.errors import UserError
from labinfer.weights.gguf.file import is_gguf, split_paths
from labinfer.weights.json_file import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order of their names, or the GGUF files of a model.

    As in Transformers, a single file goes before an index that does not name it: such an index is one that was left behind.

    Raises:
        UserError: there are none, or the index is broken.
    """
    if is_gguf(directory):
        return split_paths(directory)
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map")
        names = list(weight_map.values())
        if any(not isinstance(name, str) or Path(name).name != name or "\0" in name for name in names):
            raise UserError(f"{index}: weight_map should name files beside it")
        if SINGLE_FILE in names or not single.exists():
            return [directory / name for name in sorted(set(names))]
    if single.exists():
        return [single]
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"{directory} holds no {SINGLE_FILE} and no {INDEX_FILE}; a checkpoint is safetensors files, or GGUF, of which --model names the file"
        )
    return paths
