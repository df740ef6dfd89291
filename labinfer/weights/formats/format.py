"""Format: protocol of the code that decodes a matrix of a checkpoint; TensorReader: protocol of the reader that it gets."""

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
    """Inner loops of decoding, in torch or compiled."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if it does not exist."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Stored dtype of a tensor; None if the tensor does not exist or torch has no such dtype."""

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check the shape and dtype of a tensor without reading it.

        Raises:
            UserError: the tensor is missing, has another shape, or has a dtype that cannot be read as ``dtype``.
        """

    def read_into(self, tensor: TensorSlice) -> None:
        """Read ``tensor`` into its destination. float64, float32, float16 and bfloat16 are converted if dtypes differ, no others.

        Raises:
            UserError: see ``expect``.
        """

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read a slice into new host memory. For arguments see ``TensorSlice``, for conversions and errors ``read_into``."""
        sizes = [end - begin for begin, end in ranges]
        destination = torch.empty((*sizes, *shape[len(sizes) :]), dtype=dtype, device="cpu")
        self.read_into(TensorSlice(name=name, shape=shape, ranges=ranges, destination=destination))
        return destination

    def pieces(
        self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], unit: int = 1, skip: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield stored rows of a slice, a few at a time: (index of the first row, rows). A piece overwrites the previous one.

        Args:
            ranges: see ``TensorSlice.ranges``.
            unit: each piece but the last has a multiple of ``unit`` rows.
            skip: number of leading dimensions whose ranges have length 1; rows are without these dimensions.
        """


class MatrixForm(Protocol):
    """Form in which a rank holds a matrix (quantized or floating point), and names of its tensors in checkpoints."""

    def form(self, quantization: str) -> QuantLayout | None:
        """Form of the quantized values that a rank should hold; None for floating point, which functions may quantize on load.

        Args:
            quantization: ``--quantization`` of the run. With ``none`` every form is None.
        """

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        """Names of all checkpoint tensors that may belong to ``matrix``."""


class Format(MatrixForm, Protocol):
    """Storage format of matrices: checks and decodes the tensors of a matrix. ``plain.py`` is the simplest."""

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """Check that all tensors that ``read`` needs exist.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """Read a slice of a matrix into its destination: floating-point values, or codes in the form that ``form`` returned.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """


FormatByName = Callable[[str], Format]
"""Returns the format of a checkpoint's matrix, given the name of the matrix."""
FormByName = Callable[[str], MatrixForm]


@dataclass(frozen=True)
class Formats:
    """Format of each matrix of a checkpoint, by its ``quantization_config``."""

    choose: FormByName = field(repr=False, compare=False)
    quantization_config: Mapping[str, Any] | None = None
    """Value of ``quantization_config`` in config.json; None if missing. Checkpoints with equal values have equal formats."""
    notes: Sequence[str] = field(default=(), repr=False, compare=False)
    """Warnings to the user about formats, one line each, collected while formats of matrices are looked up."""
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
        """``quant_method`` of the checkpoint's config; empty if it is not quantized."""
        return self.quantization_config["quant_method"] if self.quantization_config else ""
