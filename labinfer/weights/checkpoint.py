"""A Hugging Face checkpoint directory: which safetensors file holds which tensor, read by range.

Only slices that were asked for are read (of a matrix cut by columns whole rows, a piece at a time), straight into the memory
of a parameter where nothing has to be converted. Files are not mapped: their pages would count as this process's memory.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from labinfer.errors import UserError
from labinfer.weights.files import weight_files
from labinfer.weights.formats.format import Format, TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.registry import read_formats
from labinfer.weights.json_file import read_json
from labinfer.weights.slices import MatrixSlice, Range, TensorSlice, WeightSlice
from labinfer.weights.stack import StackReader, stacked_names

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Floating-point dtypes by safetensors' names; any is converted into any."""
PLAIN = ("F64", "F32", "F16", "BF16")
"""Floating-point dtypes that need no scale."""
INTEGERS = {"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
"""Whole numbers: codes of quantised weights, read as they are."""
PIECE = 8 << 20
"""Bytes that are read at once where they are converted or cut on their way."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor's bytes in its file."""

    path: Path
    file: BinaryIO
    position: int
    """Offset of the tensor's first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors."""

    def at(self, index: int, itemsize: int) -> StoredTensor:
        """One entry of the first dimension."""
        shape = self.shape[1:]
        return replace(self, position=self.position + index * math.prod(shape) * itemsize, shape=shape)


class Checkpoint:
    """The tensors of a checkpoint directory, and the format of each matrix in it.

    Raises:
        UserError: no weights there, a file that is missing or broken, or a quantisation that is not supported.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.bytes_read = 0
        """Bytes of the slices that were read so far."""
        config = directory / "config.json"
        self._formats = read_formats(read_json(config) if config.exists() else {}, config)
        self._tensors: dict[str, StoredTensor] = {}
        self._names_of_stacks: dict[str, tuple[str, ...]] = {}
        for path in weight_files(directory):
            for name, tensor in _stored_tensors(path):
                if name in self._tensors:
                    first = self._tensors[name].path.name
                    raise UserError(f"tensor {name} is both in {first} and in {path.name} of {directory}")
                self._tensors[name] = tensor

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def format(self, matrix: str) -> Format:
        """The format of a matrix: plain also where it was left out of the quantisation without a word, as routers often are."""
        chosen, weight = self._formats(matrix), f"{matrix}.weight"
        names = chosen.tensor_names(matrix)
        if weight in names or weight not in self._tensors or any(name in self._tensors for name in names):
            return chosen
        return PlainFormat()

    def load(self, part: WeightSlice) -> None:
        """Read and decode a slice into its destination.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """
        if isinstance(part, TensorSlice):
            self.read_into(part)
        else:
            chosen, tensors, matrix = self._source(part)
            chosen.read(tensors, matrix)

    def check(self, part: WeightSlice) -> None:
        """Refuse what ``load`` would refuse by name, shape or dtype, without reading anything.

        Raises:
            UserError: as for ``load``.
        """
        if isinstance(part, TensorSlice):
            self.expect(part.name, part.shape, part.destination.dtype)
        else:
            chosen, tensors, matrix = self._source(part)
            chosen.check(tensors, matrix)

    def is_plain(self, matrix: MatrixSlice) -> bool:
        """Whether a matrix is stored in values, whatever the config says."""
        chosen, _, _ = self._source(matrix)
        return isinstance(chosen, PlainFormat)

    def _source(self, part: MatrixSlice) -> tuple[Format, TensorReader, MatrixSlice]:
        """The format of a matrix, its tensors, and the slice under the name that it has there.

        Raises:
            UserError: a tensor of many matrices is quantised, and the config does not say how.
        """
        chosen = self.format(part.name)
        if part.stack is None or self._tensors.keys().isdisjoint(self._stacked_names(part)):
            return chosen, self, part
        stack, tensors = part.stack.name, StackReader(self, part)
        weight = self._tensors.get(tensors.stored_name(f"{stack}.weight"))
        if weight is not None and weight.dtype in PLAIN:
            chosen = PlainFormat()
        elif isinstance(chosen, PlainFormat):
            dtype = "codes" if weight is None else weight.dtype
            raise UserError(
                f"{self.directory}: the experts in tensor {stack} are stored in {dtype}, and quantization_config in config.json does "
                f"not say how; without it they are read in {', '.join(PLAIN)} only"
            )
        return chosen, tensors, replace(part, name=stack)

    def _stacked_names(self, part: MatrixSlice) -> tuple[str, ...]:
        """Names of the tensors in which a matrix may be among others; those of a stack have one format."""
        stack = part.stack.name
        if stack not in self._names_of_stacks:
            own = self._formats(part.name).tensor_names(part.name)
            suffixes = ("weight", *(name.removeprefix(f"{part.name}.") for name in own))
            self._names_of_stacks[stack] = tuple(name for suffix in suffixes for name in stacked_names(stack, suffix))
        return self._names_of_stacks[stack]

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors that a slice may be read from."""
        if isinstance(part, TensorSlice):
            return (part.name,)
        names = self.format(part.name).tensor_names(part.name)
        return names if part.stack is None else (*names, *self._stacked_names(part))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorReader``."""
        return self._tensors[name].shape if name in self._tensors else None

    def dtype(self, name: str) -> torch.dtype | None:
        """See ``TensorReader``."""
        return (FLOATS | INTEGERS).get(self._tensors[name].dtype) if name in self._tensors else None

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """See ``TensorReader``."""
        if name not in self._tensors:
            raise UserError(
                f"{self.directory} has no tensor {name} of shape {list(shape)}; is the checkpoint complete?"
            )
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise UserError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, but the config asks for {list(shape)}"
            )
        if dtype.is_floating_point and tensor.dtype not in FLOATS:
            raise UserError(
                f"{tensor.path}: tensor {name} holds {tensor.dtype}, but floating-point numbers are expected: {', '.join(FLOATS)}"
            )
        if not dtype.is_floating_point and INTEGERS.get(tensor.dtype) != dtype:
            raise UserError(f"{tensor.path}: tensor {name} holds {tensor.dtype}, not {dtype}")

    def read_into(self, part: TensorSlice) -> None:
        """See ``TensorReader``."""
        self.expect(part.name, part.shape, part.destination.dtype)
        tensor = self._tensors[part.name]
        destination = part.destination
        dtype = (FLOATS | INTEGERS)[tensor.dtype]
        self.bytes_read += destination.numel() * dtype.itemsize
        if not part.shape:  # a number alone: a row of one
            _read_in_pieces(replace(tensor, shape=(1,)), dtype, (0, 1), [], destination.view(1))
            return
        ranges = part.ranges or ((0, part.shape[0]),)
        while len(ranges) > 1 and ranges[0][1] - ranges[0][0] == 1:  # one matrix of many: its rows alone are read
            tensor, ranges, destination = tensor.at(ranges[0][0], dtype.itemsize), ranges[1:], destination[0]
        (first, end), *cuts = ranges
        whole_rows = all(cut == (0, size) for cut, size in zip(cuts, tensor.shape[1:], strict=False))
        as_it_is = destination.dtype == dtype and destination.device.type == "cpu"
        if whole_rows and as_it_is and destination.is_contiguous():
            _read_rows(tensor, first, destination)
        else:
            _read_in_pieces(tensor, dtype, (first, end), cuts, destination)

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``TensorReader``."""
        sizes = [end - begin for begin, end in ranges]
        destination = torch.empty((*sizes, *shape[len(sizes) :]), dtype=dtype)
        self.read_into(TensorSlice(name=name, shape=shape, ranges=ranges, destination=destination))
        return destination


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


def _read_in_pieces(
    tensor: StoredTensor, dtype: torch.dtype, rows: Range, cuts: Sequence[Range], destination: torch.Tensor
) -> None:
    """Read whole rows a piece at a time, and copy what lies in ``cuts`` (ranges of the other dimensions)."""
    begin, end = rows
    num_rows = max(1, PIECE // max(1, math.prod(tensor.shape[1:]) * dtype.itemsize))
    piece = torch.empty(min(num_rows, end - begin), *tensor.shape[1:], dtype=dtype)
    inside = (slice(None), *(slice(*cut) for cut in cuts))
    for first in range(begin, end, num_rows):
        part = piece[: min(num_rows, end - first)]
        _read_rows(tensor, first, part)
        destination[first - begin : first - begin + len(part)].copy_(part[inside])
