"""CodedFormat: base class of quantized formats whose codes kernels compute with, without dequantizing the matrix."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import Codes, QuantLayout, unpack
from labinfer.weights.formats.decoded import fill
from labinfer.weights.formats.format import TensorReader
from labinfer.weights.slices import MatrixSlice, Range

LARGEST_GROUP = 128
"""Largest group size of kernels. A larger group of a checkpoint is divided into several groups with equal scales."""
TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape of a tensor, and the dtype into which it is read."""


class CodedFormat(ABC):
    """Storage format whose quantized values have scales and optional zero points; see ``Format``.

    Args:
        bits: 4 or 8.
        group: group size in the checkpoint, a multiple of 16; 0 for one scale per output.
        has_zeros: whether the checkpoint's zero points are used.
    """

    suffixes: tuple[str, ...]
    """Name suffixes of all tensors that may belong to a matrix."""
    zeros: str
    """Name suffix of the tensor with the zero points."""
    symmetric = "sym"
    """Key of ``quantization_config`` that declares symmetric quantization (no zero points)."""

    def __init__(self, bits: int, group: int, has_zeros: bool):
        self.group = group
        per_output = bits == 8 and not group and not has_zeros
        self.own_form = QuantLayout(bits, 0 if per_output else math.gcd(group, LARGEST_GROUP), has_zeros)

    def form(self, quantization: str) -> QuantLayout | None:
        return None if quantization == "none" else self.own_form

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return tuple(f"{matrix}.{suffix}" for suffix in self.suffixes)

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        self.check_tensors(tensors, matrix)

    def check_tensors(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        """Check the tensors of a matrix as ``check`` does, except the order of its inputs (act-order)."""
        for suffix, (shape, dtype) in self.specs(matrix).items():
            tensors.expect(f"{matrix.name}.{suffix}", shape, dtype)
        if not self.own_form.has_zeros and tensors.shape(f"{matrix.name}.{self.zeros}") is not None:
            whole = replace(matrix, rows=(0, matrix.outputs), columns=(0, matrix.inputs))
            zeros, middle = self.read_zeros(tensors, whole, (0, self.num_groups(matrix.inputs))), self.own_form.middle
            if not bool((zeros == middle).all()):
                raise UserError(
                    f"{matrix.name}.{self.zeros} has zero points other than {middle}, although quantization_config "
                    f"in config.json says {self.symmetric} true; set it to false"
                )

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        if isinstance(matrix.destination, Codes):
            self.read_codes(tensors, matrix, matrix.destination)
            return
        codes, functions = self.new_codes(matrix), tensors.functions
        self.read_codes(tensors, matrix, codes)

        def decode(begin: int, end: int, out_OI: torch.Tensor) -> None:
            part = codes.rows(begin, end)
            functions.decode(
                part.words.view(torch.uint8),
                part.scales,
                part.zeros,
                out_OI,
                bits=part.form.bits,
                group=part.form.group,
                lead=part.lead,
                skip=part.lead,
            )

        fill(functions, matrix.destination, (0, len(codes.words)), decode)

    def new_codes(self, matrix: MatrixSlice) -> Codes:
        """Memory for the codes of a slice."""
        return Codes.empty(self.own_form, matrix.rows[1] - matrix.rows[0], matrix.columns)

    def read_codes(self, tensors: TensorReader, matrix: MatrixSlice, codes: Codes) -> None:
        """Fill ``codes``, whose form is ``own_form``, with the quantized values of a slice."""
        self.read_words(tensors, matrix, codes)
        groups = codes.groups(self.group)
        zeros = self.read_zeros(tensors, matrix, groups) if self.own_form.has_zeros else None
        codes.put_groups(self.read_scales(tensors, matrix, groups), zeros, self.group, groups[0])

    @abstractmethod
    def specs(self, matrix: MatrixSlice) -> dict[str, TensorSpec]:
        """Shape and dtype of each tensor that is read for a matrix, by name suffix."""

    @abstractmethod
    def read_words(self, tensors: TensorReader, matrix: MatrixSlice, codes: Codes) -> None:
        """Read the quantized values of a slice into the words of ``codes``."""

    @abstractmethod
    def read_scales(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        """Scales of the groups ``groups`` for the slice's outputs: (outputs, groups) float32."""

    @abstractmethod
    def read_zeros(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        """Zero points of the groups ``groups`` for the slice's outputs: (outputs, groups) uint8."""

    def read_tensor(self, tensors: TensorReader, matrix: MatrixSlice, suffix: str, *ranges: Range) -> torch.Tensor:
        """Part ``ranges`` of the tensor of ``matrix`` whose name ends in ``suffix``, a key of ``specs``."""
        shape, dtype = self.specs(matrix)[suffix]
        return tensors.read(f"{matrix.name}.{suffix}", shape, ranges, dtype)

    def num_groups(self, inputs: int) -> int:
        """Number of quantization groups in each row of an unsharded matrix of ``inputs`` columns."""
        return -(-inputs // self.group) if self.group else 1


def read_packed(read: Callable[[Range], torch.Tensor], rows: Range, bits: int) -> torch.Tensor:
    """Read and unpack values that are packed along the outputs of a matrix.

    Args:
        read: reads a range of words, (words, groups).
        rows: range of outputs to return.

    Returns:
        (outputs, groups) uint8.
    """
    begin, end = rows
    per_word = 32 // bits
    words = read((begin // per_word, -(-end // per_word)))
    rows = words.T.clone(memory_format=torch.contiguous_format)  # contiguous() keeps the stride of a single word
    return unpack(rows, bits)[:, begin % per_word :][:, : end - begin].T
