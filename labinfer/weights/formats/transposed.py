"""TransposedFormat: experts of a layer in one floating-point tensor (experts, inputs, outputs), in which outputs of gate and up
alternate.

Source: ``GptOssExperts`` in Transformers.
"""

from __future__ import annotations

import torch

from labinfer.weights.formats.format import TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.slices import MatrixSlice, TensorSlice


class TransposedFormat(PlainFormat):
    """Matrix of one expert, read from a transposed tensor of all experts; see ``Format``. The tensor has the name of the stack."""

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        count, outputs, inputs = matrix.stack.shape
        tensors.expect(matrix.stack.name, (count, inputs, outputs), torch.float32)

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        stack, (begin, end) = matrix.stack, matrix.rows
        count, outputs, inputs = stack.shape
        parts, first = matrix.stacked_part
        columns = matrix.columns[1] - matrix.columns[0]
        part_1IO = torch.empty(1, columns, parts * (end - begin), dtype=tensors.dtype(stack.name), device="cpu")
        ranges = ((stack.index, stack.index + 1), matrix.columns, (parts * begin, parts * end))
        shape = (count, inputs, outputs)
        tensors.read_into(TensorSlice(name=stack.name, shape=shape, ranges=ranges, destination=part_1IO))
        matrix.destination.copy_(part_1IO[0, :, first::parts].T)


class InputMajorFormat(TransposedFormat):
    """Matrix of one expert, read from a tensor of all experts (experts, inputs, outputs), in which the outputs of gate and up follow one another.

    Source: the checkpoints of Qwen3-VL-MoE.
    """

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        stack, (begin, end) = matrix.stack, matrix.rows
        count, outputs, inputs = stack.shape
        first, last = stack.first_row + begin, stack.first_row + end
        part_1IO = torch.empty(
            1, matrix.columns[1] - matrix.columns[0], end - begin, dtype=tensors.dtype(stack.name), device="cpu"
        )
        ranges = ((stack.index, stack.index + 1), matrix.columns, (first, last))
        shape = (count, inputs, outputs)
        tensors.read_into(TensorSlice(name=stack.name, shape=shape, ranges=ranges, destination=part_1IO))
        matrix.destination.copy_(part_1IO[0].T)
