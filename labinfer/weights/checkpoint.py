"""A Hugging Face checkpoint directory: which safetensors file holds which tensor, read by range.

Only what this rank asks for is read (of a matrix cut by columns whole rows, a piece at a time), straight into the memory of
its parameter where nothing has to be converted. Files are not mapped: their pages would count as this process's memory.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from labinfer.errors import UserError
from labinfer.weights.files import weight_files
from labinfer.weights.source import TensorSource

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The floating-point types of a file."""
PIECE = 8 << 20
"""Bytes that are read at once where they are converted or cut on their way."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes are."""

    path: Path
    file: BinaryIO
    position: int
    """Of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """By the format's name."""


class Checkpoint:
    """The tensors of a checkpoint directory.

    Raises:
        UserError: no weights there, or a file that is missing or broken.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.bytes_read = 0
        """Of what parameters asked for."""
        self._tensors: dict[str, StoredTensor] = {}
        for path in weight_files(directory):
            for name, tensor in _stored_tensors(path):
                if name in self._tensors:
                    first = self._tensors[name].path.name
                    raise UserError(f"tensor {name} is both in {first} and in {path.name} of {directory}")
                self._tensors[name] = tensor

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def read_into(self, source: TensorSource) -> None:
        """Read the slice a parameter needs into it, converted to its type.

        Raises:
            UserError: the tensor is missing or has another shape.
        """
        if source.name not in self._tensors:
            raise UserError(
                f"{self.directory} has no tensor {source.name} of shape {list(source.shape)}; is the checkpoint complete?"
            )
        tensor = self._tensors[source.name]
        if tensor.shape != source.shape:
            raise UserError(
                f"{tensor.path}: tensor {source.name} has shape {list(tensor.shape)}, but the config asks for "
                f"{list(source.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{tensor.path}: tensor {source.name} holds {tensor.dtype}; quantised checkpoints are not supported"
            )
        destination = source.destination
        self.bytes_read += destination.numel() * DTYPES[tensor.dtype].itemsize
        as_it_is = destination.dtype == DTYPES[tensor.dtype] and destination.device.type == "cpu"
        if source.dim == 0 and as_it_is and destination.is_contiguous():
            _read_rows(tensor, source.begin, destination)
        else:
            _read_in_pieces(tensor, source)


def _stored_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of a file, by name."""
    try:
        with safe_open(str(path), framework="pt"):  # it checks the header, and that the file is as long as that says
            pass
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - as long as its tensors
    except FileNotFoundError:
        raise UserError(f"{path} is missing; is the checkpoint complete?") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({error}); download it again") from None
    length = int.from_bytes(file.read(8), "little")
    for name, entry in json.loads(file.read(length)).items():
        if name != "__metadata__":
            position = 8 + length + entry["data_offsets"][0]
            yield name, StoredTensor(path, file, position, tuple(entry["shape"]), entry["dtype"])


def _read_rows(tensor: StoredTensor, row: int, destination: torch.Tensor) -> None:
    """Read as many rows as ``destination`` has, which is contiguous, in host memory and of the tensor's type.

    Raises:
        UserError: the file has become shorter.
    """
    position = tensor.position + row * math.prod(tensor.shape[1:]) * destination.itemsize
    target = memoryview(destination.reshape(-1).view(torch.uint8).numpy())
    while target.nbytes:
        count = os.preadv(tensor.file.fileno(), [target], position)  # a call reads 2 GiB at most
        if not count:
            raise UserError(f"{tensor.path} has been cut short while it was read; download it again")
        position, target = position + count, target[count:]


def _read_in_pieces(tensor: StoredTensor, source: TensorSource) -> None:
    """Read whole rows, and give of each what the parameter holds, in its type and on its device."""
    dtype = DTYPES[tensor.dtype]
    columns = slice(source.begin, source.end) if source.dim == 1 else slice(None)
    begin, end = (source.begin, source.end) if source.dim == 0 else (0, tensor.shape[0])
    num_rows = max(1, PIECE // max(1, math.prod(tensor.shape[1:]) * dtype.itemsize))
    piece = torch.empty(min(num_rows, end - begin), *tensor.shape[1:], dtype=dtype)
    for first in range(begin, end, num_rows):
        rows = piece[: min(num_rows, end - first)]
        _read_rows(tensor, first, rows)
        taken = rows[:, columns] if source.dim == 1 else rows
        source.destination[first - begin : first - begin + len(rows)].copy_(taken)
