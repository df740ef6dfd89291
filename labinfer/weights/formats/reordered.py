"""ReorderedFormat: quantized matrices whose groups are not of consecutive inputs (act-order, ``desc_act``).

Inputs were quantized in the order of their importance, and a tensor has the group of each input. A kernel would need its inputs in
that order, which sharding over ranks does not preserve. Matrices with act-order are therefore dequantized and requantized to int8.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import QuantLayout, Range
from labinfer.weights.formats.coded import CodedFormat
from labinfer.weights.formats.decoded import ROUNDED, Decode, DecodedFormat
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.settings import Settings
from labinfer.weights.slices import MatrixSlice

REORDERED = (
    "matrices with act-order (permuted inputs) are requantized to int8 with group size 128, see "
    "docs/quantised-checkpoints.md; --quantization none dequantizes them without loss"
)
"""Warning to the user that a checkpoint with act-order is requantized."""


class ReorderedFormat(DecodedFormat):
    """Storage format in which each input has a group index.

    Args:
        ordered: format of an equal matrix whose groups are of consecutive inputs.
        order: name suffix of the tensor with the group indices.
    """

    def __init__(self, ordered: CodedFormat, order: str):
        self._ordered, self._order = ordered, order

    def form(self, quantization: str) -> QuantLayout | None:
        return None if quantization == "none" else ROUNDED

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return self._ordered.tensor_names(matrix)

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        self._ordered.check_tensors(tensors, matrix)
        self._read_order(tensors, matrix, (0, matrix.inputs))

    def _read_order(self, tensors: TensorReader, matrix: MatrixSlice, columns: Range) -> torch.Tensor:
        """Group index of each input in ``columns``.

        Raises:
            UserError: an index is out of range. Kernels do not check it.
        """
        name, count = f"{matrix.name}.{self._order}", self._ordered.num_groups(matrix.inputs)
        order = tensors.read(name, (matrix.inputs,), (columns,), torch.int32)
        outside = order[(order < 0) | (order >= count)]
        if len(outside):
            raise UserError(f"tensor {name} has group {int(outside[0])}, but has only groups 0 to {count - 1}")
        return order

    def pieces(self, tensors: TensorReader, matrix: MatrixSlice) -> Iterator[tuple[Range, Decode]]:
        ordered, codes = self._ordered, self._ordered.new_codes(matrix)
        ordered.read_words(tensors, matrix, codes)
        groups = (0, ordered.num_groups(matrix.inputs))
        scales = ordered.read_scales(tensors, matrix, groups).contiguous()
        zeros = ordered.read_zeros(tensors, matrix, groups).contiguous() if codes.form.has_zeros else None
        order = self._read_order(tensors, matrix, matrix.columns)
        numbers = codes.words.view(torch.uint8)

        def decode(begin: int, end: int, out_OI: torch.Tensor) -> None:
            tensors.functions.decode(
                numbers[begin:end],
                scales[begin:end],
                None if zeros is None else zeros[begin:end],
                out_OI,
                bits=codes.form.bits,
                group=0,
                lead=0,
                skip=codes.lead,
                order_I=order,
            )

        yield (0, len(numbers)), decode


def choose_order(settings: Settings, ordered: CodedFormat, order: str) -> FormatByName:
    """Format of each matrix in a checkpoint with act-order: ``ordered`` if the tensor of group indices shows groups of consecutive
    inputs, else ``ReorderedFormat``.

    A matrix with one group shows neither, and gets ``ReorderedFormat`` as the matrices around it.

    Args:
        order: see ``ReorderedFormat``.
    """
    reordered = ReorderedFormat(ordered, order)

    def choose(matrix: str) -> Format:
        name, tensors = f"{matrix}.{order}", settings.tensors
        if not ordered.group or (is_in_order(tensors, name, ordered.group) and tensors.shape(name)[0] > ordered.group):
            return ordered
        settings.warn(REORDERED)
        return reordered

    return choose


def is_in_order(tensors: TensorReader | None, name: str, group: int) -> bool:
    """Whether the groups of a matrix are known to be of consecutive inputs.

    Args:
        tensors: reader of the checkpoint; None if it is not available yet.
        name: name of the tensor with the group indices.
        group: group size.
    """
    shape = tensors.shape(name) if tensors is not None and tensors.dtype(name) == torch.int32 else None
    if shape is None or len(shape) != 1:
        return False
    groups = torch.arange(*shape, dtype=torch.int32, device="cpu") // group
    return torch.equal(tensors.read(name, shape, (), torch.int32), groups)
