"""Checkpoint: a directory's tensors with the format of each matrix; CheckpointReader: the interface that the loader reads from."""

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
    """Inner loops of weight loading, in torch; a provider may replace them by compiled ones."""
    bytes_read: int
    """Bytes of tensors read so far, without file headers."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in the checkpoint; None if it does not exist."""

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read a slice of a tensor that is not a matrix into new host memory; see ``TensorReader.read``."""

    def format(self, matrix: str) -> MatrixForm:
        """Form in which a rank holds a matrix, and the names of the tensors in which the checkpoint stores it."""

    def load(self, part: WeightSlice) -> None:
        """Read the tensors of ``part``, decode them, and store the result in the slice's destination.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """

    def check(self, part: WeightSlice) -> None:
        """Check a slice without loading it: its tensors' names, shapes and dtypes, and values that may contradict the config.

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
        """Format of a matrix; ``PlainFormat`` if it turns out unquantized although the config does not list it (often routers)."""
        chosen, weight = self._formats(matrix), f"{matrix}.weight"
        names = chosen.tensor_names(matrix)
        if weight in names or weight not in self._tensors or any(name in self._tensors for name in names):
            return chosen
        return PlainFormat()

    def load(self, part: WeightSlice) -> None:
        """Read the tensors of ``part``, decode them, and store the result in the slice's destination."""
        if isinstance(part, TensorSlice):
            self.read_into(part)
        else:
            chosen, tensors, matrix = self.source(part)
            chosen.read(tensors, matrix)

    def check(self, part: WeightSlice) -> None:
        """Check a slice without loading it: its tensor, or what the format of its matrix checks. Errors: ``UserError``."""
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
        """Format of a matrix, the reader of its tensors, and the slice under the name by which this reader knows the matrix."""
        return self.format(part.name), self, part

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors from which a slice may be read. The format of a matrix may store it in several tensors."""
        return (part.name,) if isinstance(part, TensorSlice) else self.format(part.name).tensor_names(part.name)
