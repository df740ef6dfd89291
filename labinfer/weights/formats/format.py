"""Format: the protocol of a way to store matrices, and of the reader that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from labinfer.weights.codes import CodeForm
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, Range, TensorSlice


class TensorReader(Protocol):
    """The tensors of a checkpoint, read by range."""

    functions: LoadFunctions
    """For what is decoded."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None where there is none of this name."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Dtype in which a tensor is stored; None where there is none of this name, or torch has none like it."""

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check a tensor without reading it.

        Raises:
            UserError: the tensor is missing, has another shape, or a dtype that is not read into ``dtype``.
        """

    def read_into(self, tensor: TensorSlice) -> None:
        """Fill the slice's destination. float64, float32, float16 and bfloat16 are converted to any of these, others not.

        Raises:
            UserError: as for ``expect``.
        """

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """The slice in new host memory; arguments and errors as for ``read_into``."""
        sizes = [end - begin for begin, end in ranges]
        destination = torch.empty((*sizes, *shape[len(sizes) :]), dtype=dtype, device="cpu")
        self.read_into(TensorSlice(name=name, shape=shape, ranges=ranges, destination=destination))
        return destination

    def pieces(
        self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], unit: int = 1, skip: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The slice as it is stored, a few of its rows at a time: (number of the first, rows). Each overwrites the one before.

        Args:
            ranges: as for ``read_into``.
            unit: all but the last have a multiple of so many rows.
            skip: leading dimensions with ranges of one entry, which rows do not have.
        """


class MatrixForm(Protocol):
    """The form in which a matrix is held, and the tensors that it is stored in."""

    def form(self, quantization: str) -> CodeForm | None:
        """The form of codes in which a rank should hold a matrix; None for values, which its functions may round.

        Args:
            quantization: the run's ``--quantization``. With ``none`` every matrix is held in values.
        """

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        """Names of all checkpoint tensors that may belong to the matrix of this name."""


class Format(MatrixForm, Protocol):
    """A way to store matrices; see ``plain.py`` for the simplest."""

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """See that everything is there that ``read`` needs.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """Read what the slice needs of the matrix's tensors, into its destination: values, or codes of this format's form.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """


FormatByName = Callable[[str], Format]
"""The format of each matrix of a checkpoint, by the matrix's name."""
FormByName = Callable[[str], MatrixForm]


@dataclass(frozen=True)
class Formats:
    """The format of each matrix of a checkpoint, as ``quantization_config`` has it."""

    choose: FormByName = field(repr=False, compare=False)
    quantization_config: Mapping[str, Any] | None = None
    """The object in config.json; None without one. Two checkpoints are stored alike if it is equal."""
    notes: Sequence[str] = field(default=(), repr=False, compare=False)
    """Remarks that came up while formats were chosen, a line each."""
    path: str = field(default="", repr=False, compare=False)
    """The config.json."""

    @property
    def warnings(self) -> list[str]:
        """Texts for the user, a line each, about the matrices that were asked for so far."""
        return [f"{self.path}: {note}" for note in self.notes]

    def __call__(self, matrix: str) -> MatrixForm:
        return self.choose(matrix)

    @property
    def method(self) -> str:
        """``quant_method`` of a quantised checkpoint, else empty."""
        return self.quantization_config["quant_method"] if self.quantization_config else ""
