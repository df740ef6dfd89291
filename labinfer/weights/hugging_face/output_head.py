"""The output head of a checkpoint directory: whether there is one, and whether it differs from the embedding that the config ties it to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from labinfer.base.errors import UserError
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.files import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, weight_files
from labinfer.weights.json_file import need_plain_file, read_json
from labinfer.weights.tensor_files import TensorFiles


def has_head(directory: Path) -> bool:
    """Whether a checkpoint has an output head of its own. True where its files cannot say: whoever reads them tells what is wrong."""
    try:
        return any(re.search(r"(?:^|\.)lm_head\.", name) for name in _tensor_names(directory))
    except (UserError, OSError, ValueError, RecursionError):
        return True


def has_different_head(directory: Path, names: CheckpointNames) -> bool:
    """Whether the files of a checkpoint directory hold an output head that is not a copy of the embedding.

    Both tensors are read to the first difference, to the end where they are equal. A head that is stored in codes counts as different:
    its values are not the embedding's. False where the files cannot be read: loading says what is wrong with them.
    """
    if not has_head(directory):
        return False
    try:
        checkpoint = TensorFiles(directory)
    except UserError:
        return False
    names = names.resolve(checkpoint.names)
    head, embedding = names.stored("lm_head"), f"{names.stored('model.embed_tokens')}.weight"
    weight = f"{head}.weight"
    if weight not in checkpoint.names:
        return any(name.startswith(f"{head}.") for name in checkpoint.names)
    if embedding not in checkpoint.names:
        return False  # loading refuses the checkpoint
    shapes = [checkpoint.shape(name) for name in (weight, embedding)]
    if shapes[0] != shapes[1] or not checkpoint.dtype(weight).is_floating_point:
        return True
    whole = ((0, shapes[0][0]),)
    pieces = [checkpoint.pieces(name, shapes[0], whole) for name in (weight, embedding)]
    if checkpoint.dtype(weight) == checkpoint.dtype(embedding):
        return any(not torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(*pieces, strict=True))
    return not torch.equal(*(checkpoint.read(name, shapes[0], whole, torch.float32) for name in (weight, embedding)))


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
