"""Checkpoint: the tensors of a directory with the format of each matrix; CheckpointReader: a model's weights as the loader sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import Range
from labinfer.weights.formats.format import Format, MatrixForm, TensorReader
from labinfer.weights.formats.mxfp4 import Mxfp4Format
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.registry import read_formats
from labinfer.weights.formats.transposed import TransposedFormat
from labinfer.weights.json_file import read_json
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, TensorSlice, WeightSlice
from labinfer.weights.stack import StackReader, stacked_names
from labinfer.weights.tensor_files import PLAIN, TensorFiles


class CheckpointReader(Protocol):
    """A model's weights, as the loader needs them."""

    directory: Path
    """Path of the directory or of the file."""
    functions: LoadFunctions
    """Compiled ones take the place of those in torch once they are there."""
    bytes_read: int
    """Bytes that were read so far, headers excluded."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorReader``."""

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``TensorReader``."""

    def format(self, matrix: str) -> MatrixForm:
        """The form in which a matrix is held, and the tensors that it is stored in."""

    def load(self, part: WeightSlice) -> None:
        """Read and decode a slice into its destination.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """

    def check(self, part: WeightSlice) -> None:
        """Refuse what ``load`` would refuse by name, shape or dtype, and codes that contradict the config.

        Raises:
            UserError: as for ``load``.
        """

    def is_plain(self, matrix: MatrixSlice) -> bool:
        """Whether a matrix is stored in values, whatever the config says."""

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors that a slice may be read from."""


class Checkpoint(TensorFiles):
    """The tensors of a checkpoint directory, and the format of each matrix in it.

    Raises:
        UserError: as for ``TensorFiles``, or a quantisation that is not supported.
    """

    def __init__(self, directory: Path):
        config = directory / "config.json"
        self._formats = read_formats(read_json(config) if config.exists() else {}, config)
        self._names_of_stacks: dict[str, tuple[str, ...]] = {}
        super().__init__(directory)

    def format(self, matrix: str) -> Format:
        """The format of a matrix: plain also where it was left out of the quantisation without a word, as routers often are."""
        chosen, weight = self._formats(matrix), f"{matrix}.weight"
        names = chosen.tensor_names(matrix)
        if weight in names or weight not in self._tensors or any(name in self._tensors for name in names):
            return chosen
        return PlainFormat()

    def load(self, part: WeightSlice) -> None:
        """See ``CheckpointReader``."""
        if isinstance(part, TensorSlice):
            self.read_into(part)
        else:
            chosen, tensors, matrix = self._source(part)
            chosen.read(tensors, matrix)

    def check(self, part: WeightSlice) -> None:
        """See ``CheckpointReader``."""
        if isinstance(part, TensorSlice):
            self.expect(part.name, part.shape, part.destination.dtype)
        else:
            chosen, tensors, matrix = self._source(part)
            chosen.check(tensors, matrix)

    def is_plain(self, matrix: MatrixSlice) -> bool:
        """See ``CheckpointReader``."""
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
        if part.stack.is_transposed:  # rows that take turns are found by these two
            if weight is not None and weight.dtype in PLAIN:
                return TransposedFormat(), self, part
            if isinstance(chosen, Mxfp4Format):
                return chosen, self, part
            raise UserError(
                f"{self.directory}: the experts in tensor {stack} are neither in {', '.join(PLAIN)} nor in MXFP4 by config.json; "
                "only these are read"
            )
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
        """See ``CheckpointReader``."""
        if isinstance(part, TensorSlice):
            return (part.name,)
        names = self.format(part.name).tensor_names(part.name)
        return names if part.stack is None else (*names, *self._stacked_names(part))
