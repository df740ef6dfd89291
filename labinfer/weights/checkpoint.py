"""Checkpoint: tensors of a directory with the format of each matrix; CheckpointReader: the loader's view of a model's weights."""

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
    """Reader of a model's weights: the interface that the loader uses."""

    directory: Path
    """Path of the directory or of the file."""
    functions: LoadFunctions
    """Loading functions; a provider may replace them by compiled ones."""
    bytes_read: int
    """Bytes read so far, headers excluded."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in the checkpoint; None if it does not exist."""

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read a slice of a tensor that is not a matrix into new host memory; see ``TensorReader.read``."""

    def format(self, matrix: str) -> MatrixForm:
        """Form of a matrix in memory, and the tensors in which it is stored."""

    def load(self, part: WeightSlice) -> None:
        """Read a slice, decode it and store it in its destination.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """

    def check(self, part: WeightSlice) -> None:
        """Check a slice without loading it: names, shapes, dtypes, and quantized values that may contradict the config.

        Raises:
            UserError: ``load`` would raise, or a value contradicts the config.
        """

    def is_plain(self, matrix: MatrixSlice) -> bool:
        """Whether a matrix is stored unquantized, whatever the config says."""

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors from which a slice may be read."""


class Checkpoint(TensorFiles):
    """Tensors of a checkpoint directory, with the format of each matrix.

    Args:
        formats: format of each matrix, as the config declares it.

    Raises:
        UserError: see ``TensorFiles``.
    """

    def __init__(self, directory: Path, formats: Formats):
        self._formats = formats
        super().__init__(directory)

    def format(self, matrix: str) -> Format:
        """Format of a matrix. Plain if the matrix was left unquantized without being listed in the config, as routers often are."""
        chosen, weight = self._formats(matrix), f"{matrix}.weight"
        names = chosen.tensor_names(matrix)
        if weight in names or weight not in self._tensors or any(name in self._tensors for name in names):
            return chosen
        return PlainFormat()

    def load(self, part: WeightSlice) -> None:
        """Read a slice, decode it and store it in its destination."""
        if isinstance(part, TensorSlice):
            self.read_into(part)
        else:
            chosen, tensors, matrix = self.source(part)
            chosen.read(tensors, matrix)

    def check(self, part: WeightSlice) -> None:
        """Check a slice without loading it: its tensor's name, shape and dtype, or, for a matrix, all that its format checks. Errors: ``UserError``."""
        if isinstance(part, TensorSlice):
            self.expect(part.name, part.shape, part.destination.dtype)
        else:
            chosen, tensors, matrix = self.source(part)
            chosen.check(tensors, matrix)

    def is_plain(self, matrix: MatrixSlice) -> bool:
        """Whether a matrix is stored unquantized, whatever the config says."""
        chosen, _, _ = self.source(matrix)
        return isinstance(chosen, PlainFormat)

    def source(self, part: MatrixSlice) -> tuple[Format, TensorReader, MatrixSlice]:
        """Format of a matrix, the reader of its tensors, and the slice with its name for that reader."""
        return self.format(part.name), self, part

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors from which a slice may be read; a matrix can have several, by its format."""
        return (part.name,) if isinstance(part, TensorSlice) else self.format(part.name).tensor_names(part.name)
