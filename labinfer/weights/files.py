"""weight_files: paths of the safetensors files of a directory, without opening them."""

from __future__ import annotations

from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.weights.json_file import need_plain_file, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(directory: Path) -> list[Path]:
    """Paths of a checkpoint's safetensors files, sorted by name.

    As in Transformers, ``model.safetensors`` takes precedence over an index that does not name it or is no JSON object (a leftover).

    Raises:
        UserError: there are no such files, or the index is invalid.
    """
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
            raise UserError(f"{index}: weight_map should name files in the same directory")
        return [directory / name for name in sorted(set(names))]
    if single.exists():
        return [single]
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"{directory} holds no {SINGLE_FILE} and no {INDEX_FILE}; --model takes a directory with safetensors "
            "files, or a GGUF file"
        )
    return paths
