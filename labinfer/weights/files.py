"""The files of a model's weights, by their names alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.weights.gguf.file import is_gguf, split_paths
from labinfer.weights.json_file import need_plain_file, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""Bytes of a safetensors header at most, as the format's own reader has it."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order of their names, or the GGUF files of a model.

    As in Transformers, a single file goes before an index that does not name it or is no JSON object: such an index was left behind.

    Raises:
        UserError: there are none, or the index is broken.
    """
    if is_gguf(directory):
        return split_paths(directory)
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.exists():
        need_plain_file(index)
        try:
            weight_map = read_json(index).get("weight_map")
        except UserError:
            if not single.exists():
                raise
            return [single]
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if SINGLE_FILE not in names and single.exists():
            return [single]
        if not names:
            raise UserError(f"{index} has no weight_map")
        if any(not isinstance(name, str) or Path(name).name != name or "\0" in name for name in names):
            raise UserError(f"{index}: weight_map should name files beside it")
        return [directory / name for name in sorted(set(names))]
    if single.exists():
        return [single]
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"{directory} holds no {SINGLE_FILE} and no {INDEX_FILE}; a checkpoint is safetensors files, or GGUF, of which --model names the file"
        )
    return paths


def has_head(directory: Path) -> bool:
    """Whether a checkpoint has an output head of its own. True where its files cannot say: whoever reads them tells what is wrong."""
    if is_gguf(directory):
        return True  # what these leave out is tied
    try:
        return any(re.search(r"(?:^|\.)lm_head\.", name) for name in _tensor_names(directory))
    except (UserError, OSError, ValueError, RecursionError):
        return True


def _tensor_names(directory: Path) -> Iterator[str]:
    """Names of a checkpoint's tensors, by its index or else by the headers of its files.

    Raises:
        UserError, OSError, ValueError: there are none, or a file is broken.
    """
    paths = weight_files(directory)
    if (directory / INDEX_FILE).exists() and paths != [directory / SINGLE_FILE]:
        yield from read_json(directory / INDEX_FILE)["weight_map"]
        return
    for path in paths:
        need_plain_file(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            yield from json.loads(file.read(length))
