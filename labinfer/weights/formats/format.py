"""Format: protocol of a storage format of matrices; TensorReader: protocol of the reader that a format gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from labinfer.weights.codes import QuantLayout
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, Range, TensorSlice


class TensorReader(Protocol):
    """Reader of a checkpoint's tensors by ranges."""

    functions: LoadFunctions
    """Functions that decode tensors."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if it does not exist."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Stored dtype of a tensor; None if the tensor does not exist or torch has no such dtype."""

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check a tensor without reading it.

        Raises:
            UserError: the tensor is missing, has another shape, or has a dtype that cannot be read as ``dtype``.
        """

    def read_into(self, tensor: TensorSlice) -> None:
        """Fill the slice's destination. float64, float32, float16 and bfloat16 are converted into each other; other dtypes are not converted.

        Raises:
            UserError: see ``expect``.
        """

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read a slice into new host memory. See ``read_into`` for arguments and errors."""
        sizes = [end - begin for begin, end in ranges]
        destination = torch.empty((*sizes, *shape[len(sizes) :]), dtype=dtype, device="cpu")
        self.read_into(TensorSlice(name=name, shape=shape, ranges=ranges, destination=destination))
        return destination

    def pieces(
        self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], unit: int = 1, skip: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Stored rows of a slice, a few at a time: (index of the first row, rows). Each piece overwrites the memory of the previous one.

        Args:
            ranges: see ``TensorSlice.ranges``.
            unit: each piece but the last has a multiple of ``unit`` rows.
            skip: number of leading dimensions whose ranges have one entry; rows do not have these dimensions.
        """


class MatrixForm(Protocol):
    """Form of a matrix in memory (layout of quantized values, or floating point), and its tensors in checkpoints."""

    def form(self, quantization: str) -> QuantLayout | None:
        """Layout of the quantized values that a rank should hold; None for floating-point values, which its functions may quantize.

        Args:
            quantization: ``--quantization`` of the run. ``none`` holds every matrix in floating point.
        """

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        """Names of all checkpoint tensors that may belong to ``matrix``."""


class Format(MatrixForm, Protocol):
    """Storage format of matrices; see ``plain.py`` for the simplest."""

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """Check that all tensors that ``read`` needs exist.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """Read a slice of a matrix into its destination: floating-point values, or codes of this format's form.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """


FormatByName = Callable[[str], Format]
"""Function that returns the format of a checkpoint's matrix, given the matrix name."""
FormByName = Callable[[str], MatrixForm]


@dataclass(frozen=True)
class Formats:
    """Format of each matrix of a checkpoint, by its ``quantization_config``."""

    choose: FormByName = field(repr=False, compare=False)
    quantization_config: Mapping[str, Any] | None = None
    """Value of this key in config.json; None if the config lacks it. Checkpoints with equal values have equal formats."""
    notes: Sequence[str] = field(default=(), repr=False, compare=False)
    """Remarks about formats for the user, one line each, added while formats of matrices are looked up."""
    path: str = field(default="", repr=False, compare=False)
    """Path of the config.json."""

    @property
    def warnings(self) -> list[str]:
        """Warnings to the user about the formats of the matrices looked up so far, one line each."""
        return [f"{self.path}: {note}" for note in self.notes]

    def __call__(self, matrix: str) -> MatrixForm:
        return self.choose(matrix)

    @property
    def method(self) -> str:
        """``quant_method`` of a quantized checkpoint; empty otherwise."""
        return self.quantization_config["quant_method"] if self.quantization_config else ""
