"""Checkpoint: the tensors of a directory with the format of each matrix; CheckpointReader: a model's weights as the loader sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from labinfer.weights.codes import Range
from labinfer.weights.formats.format import Format, Formats, MatrixForm, TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, TensorSlice, WeightSlice
from labinfer.weights.tensor_files import TensorFiles


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

    Args:
        formats: as the config names them.

    Raises:
        UserError: as for ``TensorFiles``.
    """

    def __init__(self, directory: Path, formats: Formats):
        self._formats = formats
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
            chosen, tensors, matrix = self.source(part)
            chosen.read(tensors, matrix)

    def check(self, part: WeightSlice) -> None:
        """See ``CheckpointReader``."""
        if isinstance(part, TensorSlice):
            self.expect(part.name, part.shape, part.destination.dtype)
        else:
            chosen, tensors, matrix = self.source(part)
            chosen.check(tensors, matrix)

    def is_plain(self, matrix: MatrixSlice) -> bool:
        """See ``CheckpointReader``."""
        chosen, _, _ = self.source(matrix)
        return isinstance(chosen, PlainFormat)

    def source(self, part: MatrixSlice) -> tuple[Format, TensorReader, MatrixSlice]:
        """The format of a matrix, its tensors, and the slice under the name that it has there."""
        return self.format(part.name), self, part

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """See ``CheckpointReader``."""
        return (part.name,) if isinstance(part, TensorSlice) else self.format(part.name).tensor_names(part.name)
