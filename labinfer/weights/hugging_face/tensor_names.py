"""has_head: whether a checkpoint directory has an LM head, by its tensor names. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.weights.files import INDEX_FILE, SINGLE_FILE, weight_files
from labinfer.weights.json_file import need_plain_file, read_json

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header in bytes, as in the reference reader."""


def has_head(directory: Path) -> bool:
    """Whether a checkpoint has an LM head of its own. True if its files cannot be read; loading will report why."""
    try:
        return any(re.search(r"(?:^|\.)lm_head\.", name) for name in _tensor_names(directory))
    except (UserError, OSError, ValueError, RecursionError):
        return True


def _tensor_names(directory: Path) -> Iterator[str]:
    """Names of a checkpoint's tensors, from its index or from the headers of its files.

    Raises:
        UserError, OSError, ValueError: the directory has no weights, or a file is invalid.
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
