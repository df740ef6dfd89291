"""TensorFiles: the tensors of a checkpoint's safetensors files, read by range.

Reads only requested slices, directly into the memory of a parameter if no conversion is needed. Files are not mapped: their pages would
count as this process's memory.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from labinfer.base.errors import UserError
from labinfer.weights.codes import Range
from labinfer.weights.files import weight_files
from labinfer.weights.formats.format import TensorReader
from labinfer.weights.json_file import need_plain_file
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import TensorSlice

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point dtypes by their names in safetensors. A tensor in one of them can be read as any other."""
CODED = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes of quantized values, scales and indices, by their names in safetensors. They are never converted."""
PIECE = 2 << 20
"""Bytes that are read at a time if values are converted: the size of the L2 caches of two threads."""
SHORTEST_GAP = 2 << 10
"""Minimum gap, in bytes, that is skipped between two parts of a file. Reading a smaller gap is faster than one more system call."""


@dataclass(frozen=True)
class StoredTensor:
    """Position and layout of a tensor in its file."""

    path: Path
    file: BinaryIO
    position: int
    """Offset of the tensor's first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors."""


class TensorFiles(TensorReader):
    """Reader of the tensors of a checkpoint directory.

    Raises:
        UserError: the directory has no weights, or a file is missing or invalid.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.functions = LoadFunctions()
        """Inner loops of weight loading, in torch; a provider may replace them by compiled ones."""
        self.bytes_read = 0
        """Bytes of tensors read so far, without file headers."""
        self._tensors: dict[str, StoredTensor] = {}
        for path in weight_files(directory):
            for name, tensor in _stored_tensors(path):
                if name in self._tensors:
                    first = self._tensors[name].path.name
                    raise UserError(f"tensor {name} occurs both in {first} and in {path.name} of {directory}")
                self._tensors[name] = tensor

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if it does not exist."""
        return self._tensors[name].shape if name in self._tensors else None

    def dtype(self, name: str) -> torch.dtype | None:
        """Stored dtype of a tensor; None if the tensor does not exist or torch has no such dtype."""
        return (PLAIN | CODED).get(self._tensors[name].dtype) if name in self._tensors else None

    def span(self, name: str) -> tuple[Path, int, int]:
        """File of a tensor, offset of its first byte, and its size in bytes."""
        tensor = self._tensors[name]
        return tensor.path, tensor.position, math.prod(tensor.shape) * (PLAIN | CODED)[tensor.dtype].itemsize

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check that a tensor exists, has ``shape``, and can be read as ``dtype``; see ``TensorReader``."""
        if name not in self._tensors:
            raise UserError(
                f"{self.directory} has no tensor {name} of shape {list(shape)}; is the checkpoint complete?"
            )
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise UserError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, but the config implies {list(shape)}"
            )
        if dtype in CODED.values():
            if CODED.get(tensor.dtype) != dtype:
                raise UserError(f"{tensor.path}: tensor {name} holds {tensor.dtype}, not {dtype}")
        elif tensor.dtype not in PLAIN:
            raise UserError(
                f"{tensor.path}: tensor {name} holds {tensor.dtype}, but a floating-point dtype is expected: "
                f"{', '.join(PLAIN)}"
            )

    def read_into(self, part: TensorSlice) -> None:
        """Read a slice into its destination: directly if the dtypes are equal, else in pieces that are converted."""
        self.expect(part.name, part.shape, part.destination.dtype)
        destination = part.destination if part.shape else part.destination.view(1)
        if destination.dtype == self.dtype(part.name) and destination.device.type == "cpu":
            tensor = self._tensors[part.name]
            self._read(tensor, tensor.position, part.shape or (1,), part.ranges, destination)
            return
        for first, piece in self.pieces(part.name, part.shape, part.ranges):
            destination[first : first + len(piece)].copy_(piece)

    def pieces(
        self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], unit: int = 1, skip: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the stored rows of a slice, ``PIECE`` bytes or fewer at a time; see ``TensorReader``."""
        dtype = self.dtype(name)
        self.expect(name, shape, dtype)
        tensor, shape = self._tensors[name], shape or (1,)
        ranges = (*ranges, *((0, size) for size in shape[len(ranges) :]))
        entry, (begin, end), cuts = ranges[:skip], ranges[skip], ranges[skip + 1 :]
        sizes = [last - first for first, last in cuts]
        step = max(1, PIECE // max(1, math.prod(sizes) * dtype.itemsize) // unit) * unit
        memory = torch.empty(min(step, end - begin), *sizes, dtype=dtype, device="cpu")
        for first in range(begin, end, step):
            piece = memory[: min(step, end - first)]
            rows = (first, first + len(piece))
            self._read(tensor, tensor.position, shape, (*entry, rows, *cuts), piece.view(*[1] * skip, *piece.shape))
            yield first - begin, piece

    def _read(
        self,
        tensor: StoredTensor,
        position: int,
        shape: Sequence[int],
        ranges: Sequence[Range],
        destination: torch.Tensor,
    ) -> None:
        """Read ``ranges`` of an array of ``shape``, which begins at byte ``position`` of the tensor's file.

        Raises:
            UserError: the file has been truncated, or cannot be read.
        """
        if not destination.numel():
            return
        (begin, end), *cuts = (*ranges, *((0, size) for size in shape[len(ranges) :]))
        stride = math.prod(shape[1:]) * destination.itemsize
        position += begin * stride
        whole = all(cut == (0, size) for cut, size in zip(cuts, shape[1:], strict=True))
        run = math.prod(last - first for first, last in cuts[:1]) * math.prod(shape[2:]) * destination.itemsize
        is_cut_further = any(cut != (0, size) for cut, size in zip(cuts[1:], shape[2:], strict=True))
        if destination.ndim > 2 and (is_cut_further or not destination[0].is_contiguous()):
            for entry in destination:
                self._read(tensor, position, shape[1:], cuts, entry)
                position += stride
        elif whole or stride - run >= SHORTEST_GAP:
            first = 0 if whole else cuts[0][0] * math.prod(shape[2:]) * destination.itemsize
            rows = destination.view(len(destination), -1).view(torch.uint8)
            if not self.functions.read_rows(tensor.file.fileno(), position + first, stride, rows):
                raise UserError(f"{tensor.path} is truncated, or cannot be read; download it again")
            self.bytes_read += rows.numel()
        else:
            rows = destination.new_empty(end - begin, *shape[1:])
            self._read(tensor, position, rows.shape, (), rows)
            destination.copy_(rows[:, slice(*cuts[0])])


def _stored_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Tensors of a file, with their names."""
    need_plain_file(path)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - as long as its tensors
        with safe_open(str(path), framework="pt"):  # checks the header, and that the file has all tensors
            pass
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; is the checkpoint complete?") from None
    except (SafetensorError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({error}); download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    for name, entry in entries.items():
        if name != "__metadata__":
            position = 8 + length + entry["data_offsets"][0]
            yield name, StoredTensor(path, file, position, tuple(entry["shape"]), entry["dtype"])
