"""``StackReader``: reads one expert's matrix from tensors that hold the matrices of all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.weights.formats.format import TensorReader
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, Range, TensorSlice


def stacked_names(stack: str, suffix: str) -> tuple[str, ...]:
    """Possible names of the tensor of a stack that has, for all experts, what the tensor with ``suffix`` has for one matrix.

    The weights of stack ``experts.down_proj`` are in ``experts.down_proj`` or ``experts.down_proj.weight``; its scales
    have ``_scale_inv`` or ``.weight_scale_inv`` after ``experts.down_proj``.
    """
    short = suffix.removeprefix("weight").removeprefix("_")
    return tuple(dict.fromkeys((f"{stack}.{suffix}", f"{stack}_{short}" if short else stack, f"{stack}_{suffix}")))


class StackReader(TensorReader):
    """``TensorReader`` that presents one matrix of a stack as if it had its own tensors, named after the stack.

    The leading dimension of a stack's tensor is the expert. If the stack fuses several projections into one matrix, their rows are
    concatenated along the next dimension; if the next dimension has size 1, all projections share its entry.

    Args:
        tensors: reader of the checkpoint.
        matrix: matrix slice with its position in the stack.
    """

    def __init__(self, tensors: TensorReader, matrix: MatrixSlice):
        self._tensors, self._stack = tensors, matrix.stack
        self._parts, self._part = matrix.stacked_part

    @property
    def functions(self) -> LoadFunctions:
        return self._tensors.functions

    def stored_name(self, name: str) -> str:
        """Name in the checkpoint of a stack's tensor: the first of ``stacked_names`` that exists, else the shortest."""
        names = stacked_names(self._stack.name, name.removeprefix(f"{self._stack.name}."))
        return next((stored for stored in names if self._tensors.shape(stored) is not None), names[1])

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._tensors.shape(self.stored_name(name))
        return None if stored is None else self._own_shape(stored)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._tensors.dtype(self.stored_name(name))

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        stored = self.stored_name(name)
        self._tensors.expect(stored, self._stack_shape(stored, shape), dtype)

    def read_into(self, tensor: TensorSlice) -> None:
        name, shape, ranges = self._place(tensor.name, tensor.shape, tensor.ranges)
        destination = tensor.destination.unsqueeze(0)
        self._tensors.read_into(TensorSlice(name=name, shape=shape, ranges=ranges, destination=destination))

    def pieces(
        self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], unit: int = 1, skip: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        return self._tensors.pieces(*self._place(name, shape, ranges), unit, skip + 1)

    def _place(
        self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...]
    ) -> tuple[str, tuple[int, ...], tuple[Range, ...]]:
        """Where to read ``ranges`` of this matrix's tensor ``name`` of ``shape``: name and shape of the stack's tensor, and ranges
        in it."""
        name, index = self.stored_name(name), self._stack.index
        stack_shape = self._stack_shape(name, shape)
        ranges = ranges or tuple((0, size) for size in shape[:1])
        if len(stack_shape) > 1 and stack_shape[1] != shape[0]:
            (begin, end), offset = ranges[0], self._part * shape[0]
            ranges = ((offset + begin, offset + end), *ranges[1:])
        return name, stack_shape, ((index, index + 1), *ranges)

    def _own_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this projection's part of a stack's tensor, whose shape is ``stored``."""
        _, *own = stored
        if own and own[0] > 1 and own[0] % self._parts == 0:
            own[0] //= self._parts
        return tuple(own)

    def _stack_shape(self, stored_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Expected shape of the stack's tensor ``stored_name`` if this projection's part of it has ``shape``. If the checkpoint's
        shape is consistent with that, it is returned."""
        count, stored = self._stack.shape[0], self._tensors.shape(stored_name)
        if stored is not None and stored[0] == count and self._own_shape(stored) == shape:
            return stored
        return (count, shape[0] * self._parts, *shape[1:]) if shape else (count,)
