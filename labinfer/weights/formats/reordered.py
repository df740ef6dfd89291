"""ReorderedFormat: codes whose groups are not of consecutive inputs (act-order, ``desc_act``).

Inputs were quantised in the order of their importance, and a tensor says the group of each. A kernel would need its inputs in
that order, which no cut over ranks keeps. So these matrices are decoded, in their own order, and rounded to int8.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import CodeForm, Range
from labinfer.weights.formats.coded import CodedFormat
from labinfer.weights.formats.decoded import ROUNDED, Decode, DecodedFormat
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.settings import Settings
from labinfer.weights.slices import MatrixSlice

REORDERED = (
    "inputs are quantised in an order of their own (act-order); these matrices are rounded to int8 by groups of 128, see "
    "docs/quantised-checkpoints.md; --quantization none keeps their values"
)
"""Warning to the user."""


class ReorderedFormat(DecodedFormat):
    """A format with an order of inputs.

    Args:
        ordered: the same without.
        order: last part of the name of the tensor that has the group of each input.
    """

    def __init__(self, ordered: CodedFormat, order: str):
        self._ordered, self._order = ordered, order

    def form(self, quantization: str) -> CodeForm | None:
        return None if quantization == "none" else ROUNDED

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return self._ordered.tensor_names(matrix)

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        self._ordered.check_tensors(tensors, matrix)
        self._read_order(tensors, matrix, (0, matrix.inputs))

    def _read_order(self, tensors: TensorReader, matrix: MatrixSlice, columns: Range) -> torch.Tensor:
        """The group of each of these inputs.

        Raises:
            UserError: there is no such group. Kernels do not look.
        """
        name, count = f"{matrix.name}.{self._order}", self._ordered.num_groups(matrix.inputs)
        order = tensors.read(name, (matrix.inputs,), (columns,), torch.int32)
        outside = order[(order < 0) | (order >= count)]
        if len(outside):
            raise UserError(f"tensor {name} has group {int(outside[0])}, but there are only groups 0 to {count - 1}")
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
    """The format of each matrix where inputs may have an order of their own: ``ordered`` where they have none after all.

    A matrix with a single group says nothing of it, and goes with those beside it.

    Args:
        order: as for ``ReorderedFormat``.
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
    """Whether groups are of consecutive inputs, as far as can be seen.

    Args:
        tensors: None where there are none yet.
        name: of the tensor that has the group of each input.
        group: inputs of each.
    """
    shape = tensors.shape(name) if tensors is not None and tensors.dtype(name) == torch.int32 else None
    if shape is None or len(shape) != 1:
        return False
    groups = torch.arange(*shape, dtype=torch.int32, device="cpu") // group
    return torch.equal(tensors.read(name, shape, (), torch.int32), groups)
