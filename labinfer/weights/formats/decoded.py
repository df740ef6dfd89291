"""DecodedFormat: base class of formats that are dequantized on loading, and optionally requantized to int8 by groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from labinfer.weights.codes import Codes, QuantLayout, Range, row_chunks
from labinfer.weights.formats.format import TensorReader
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice

ROUNDED = QuantLayout(bits=8, group=128)
"""Form of weights that are requantized to int8. A group has 128 inputs, as a block of FP8 has."""
Decode = Callable[[int, int, torch.Tensor], None]
"""Decodes rows of a slice, from ``begin`` to ``end``: ``decode(begin, end, out)`` fills ``out`` (rows, columns) of float32 or
bfloat16."""


class DecodedFormat(ABC):
    """Storage format whose values are dequantized while loading, as no kernel computes with them; see ``Format``."""

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        for rows, decode in self.pieces(tensors, matrix):
            fill(tensors.functions, matrix.destination, rows, decode)

    @abstractmethod
    def pieces(self, tensors: TensorReader, matrix: MatrixSlice) -> Iterator[tuple[Range, Decode]]:
        """Ranges of rows that together are the slice (row 0 is its first row), each with a function that decodes rows of the
        range."""


def fill(functions: LoadFunctions, destination: torch.Tensor | Codes, rows: Range, decode: Decode) -> None:
    """Fill ``rows`` of ``destination`` with decoded weights. If ``destination`` is ``Codes``, quantize the weights to int8 by
    groups."""
    if isinstance(destination, Codes):
        width = destination.columns[1] - destination.columns[0]
    elif destination.device.type == "cpu" and destination.dtype in (torch.float32, torch.bfloat16):
        decode(*rows, destination[slice(*rows)])
        return
    else:
        width = destination.shape[1]
    for begin, end in row_chunks(*rows, width):
        values = torch.empty(end - begin, width)
        decode(begin, end, values)
        if isinstance(destination, Codes):
            codes = destination.rows(begin, end)
            bytes_OB, group = codes.words.view(torch.uint8), codes.form.group
            functions.round_groups(values, bytes_OB, codes.scales, group=group, lead=codes.lead)
        else:
            destination[begin:end].copy_(values)
