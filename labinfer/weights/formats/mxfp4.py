"""MXFP4: values of 4 bits (e2m1) with a power-of-two scale for each 32 inputs of an output, the format of gpt-oss's experts.

``NAME_blocks`` is (experts, outputs, groups, 16) bytes with two inputs each, the first in the lower half of the byte.
``NAME_scales`` is (experts, outputs, groups) exponents with a bias of 127. Outputs of gate and up alternate. The values times 2 are
integers, which kernels look up in a table.

Source: OCP Microscaling Formats 1.0, 5.3.3 and 5.4; ``convert_moe_packed_tensors`` in Transformers.
"""

from __future__ import annotations

import re

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import Codes, QuantLayout, Range, row_chunks, unpack
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.settings import Settings
from labinfer.weights.slices import MatrixSlice

GROUP = 32
FORM = QuantLayout(bits=4, group=GROUP, table="e2m1")
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the 16 E2M1 codes (4-bit floats) times 2, which are integers."""


def half_powers(exponents: torch.Tensor) -> torch.Tensor:
    """Scales for values times 2, float32: ``2 ** (exponent - 128)``, half of each stored scale.

    Args:
        exponents: integers of at least 32 bits, from 0 to 255.
    """
    bits = torch.where(exponents < 2, 1 << 21 << exponents, exponents - 1 << 23)  # 0 and 1 give subnormals
    return bits.to(torch.int32).view(torch.float32)


class Mxfp4Format:
    """Matrix of one expert, read from the tensors of all experts of a layer; see ``Format``. Tensor names begin with the stack's name."""

    def form(self, quantization: str) -> QuantLayout | None:
        return None if quantization == "none" else FORM

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return tuple(f"{matrix}.{suffix}" for suffix in ("weight", "blocks", "scales"))

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        name, (count, outputs, inputs) = matrix.stack.name, matrix.stack.shape
        if inputs % GROUP:
            raise UserError(f"{name}: {inputs} inputs are not a multiple of the MXFP4 group size {GROUP}")
        tensors.expect(f"{name}_blocks", (count, outputs, inputs // GROUP, GROUP // 2), torch.uint8)
        tensors.expect(f"{name}_scales", (count, outputs, inputs // GROUP), torch.uint8)

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        begin, destination = matrix.rows[0], matrix.destination
        first, last = matrix.columns[0] // GROUP, -(-matrix.columns[1] // GROUP)
        inside = slice(matrix.columns[0] - GROUP * first, matrix.columns[1] - GROUP * first)
        for rows in row_chunks(*matrix.rows, GROUP * (last - first)):
            bytes_OGB, scales_OG = self._read_blocks(tensors, matrix, rows, (first, last))
            if isinstance(destination, Codes):
                part = destination.rows(rows[0] - begin, rows[1] - begin)
                part.words.view(torch.uint8).copy_(bytes_OGB.flatten(1))
                part.scales.copy_(scales_OG)
            else:
                whole_OGI = torch.tensor(E2M1, dtype=torch.int16)[unpack(bytes_OGB, 4).int()]
                values_OI = (whole_OGI * scales_OG.unsqueeze(2)).flatten(1)
                destination[rows[0] - begin : rows[1] - begin].copy_(values_OI[:, inside])

    def _read_blocks(
        self, tensors: TensorReader, matrix: MatrixSlice, rows: Range, groups: Range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of two codes each, (outputs, groups, 16), and scales for values times 2, (outputs, groups) float32."""
        stack = matrix.stack
        count, outputs, inputs = stack.shape
        parts, part = matrix.stacked_part
        ranges = ((stack.index, stack.index + 1), (parts * rows[0], parts * rows[1]), groups)
        shape = (count, outputs, inputs // GROUP)
        bytes_OGB = tensors.read(f"{stack.name}_blocks", (*shape, GROUP // 2), ranges, torch.uint8)[0, part::parts]
        exponents_OG = tensors.read(f"{stack.name}_scales", shape, ranges, torch.uint8)[0, part::parts]
        return bytes_OGB, half_powers(exponents_OG.int())


def read_mxfp4(settings: Settings) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` mxfp4."""
    settings.names("modules_to_not_convert")
    plain, mxfp4 = PlainFormat(), Mxfp4Format()

    def choose(matrix: str) -> Format:
        return mxfp4 if re.search(r"\.experts\.\d+\.", matrix) else plain

    return choose
