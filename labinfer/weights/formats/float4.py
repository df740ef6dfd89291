"""NVFP4 and MXFP4 of linear layers: 4-bit floats (e2m1) with a scale for each group of 16 or 32 inputs of an output.

Two codes share a byte, the first input in its lower half: (outputs, inputs / 2) uint8. Scales are (outputs, groups).

- NVFP4: groups of 16, FP8 scales (e4m3), and a float32 scale of the matrix. ``nvfp4-pack-quantized`` of compressed-tensors stores the
  codes as ``weight_packed``, and divides by ``weight_global_scale``; NVIDIA's ModelOpt stores them as ``weight``, and multiplies by
  ``weight_scale_2``.
- MXFP4: groups of 32, scales that are powers of two. ``mxfp4-pack-quantized`` stores the codes as ``weight_packed``, and exponents with
  a bias of 127.

The values times 2 are integers, which kernels look up in a table. Scales of activations are not read: kernels quantize activations to
8 bits. The experts of gpt-oss have another layout of MXFP4, see ``mxfp4.py``.

Source: vllm-project/compressed-tensors, compressors/; NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import Codes, QuantLayout, Range, row_chunks, unpack
from labinfer.weights.formats.format import TensorReader
from labinfer.weights.formats.mxfp4 import E2M1, half_powers
from labinfer.weights.slices import MatrixSlice

FLOAT8 = torch.float8_e4m3fn
ACTIVATIONS = ("input_global_scale", "input_scale")


@dataclass(frozen=True)
class Float4Format:
    """Matrix of 4-bit floats; see ``Format``."""

    codes: str
    """Name suffix of the codes."""
    layout: QuantLayout
    """Form of the codes in memory."""
    global_scale: str = ""
    """Name suffix of the matrix's scale; empty for none, if scales of groups are powers of two."""
    divides: bool = False
    """Whether values are divided by the matrix's scale (otherwise they are multiplied by it)."""

    def form(self, quantization: str) -> QuantLayout | None:
        return None if quantization == "none" else self.layout

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        scales = (self.global_scale,) if self.global_scale else ()
        return tuple(f"{matrix}.{suffix}" for suffix in (self.codes, "weight_scale", *scales, *ACTIVATIONS))

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        name, group = matrix.name, self.layout.group
        if matrix.inputs % group:
            raise UserError(f"{name}: {matrix.inputs} inputs are not a multiple of the group size {group}")
        tensors.expect(f"{name}.{self.codes}", (matrix.outputs, matrix.inputs // 2), torch.uint8)
        tensors.expect(
            f"{name}.weight_scale", (matrix.outputs, matrix.inputs // group), self._scale_dtype(tensors, name)
        )
        if self.global_scale:
            self._read_global_scale(tensors, name)

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        begin, destination, group = matrix.rows[0], matrix.destination, self.layout.group
        first, last = matrix.columns[0] // group, -(-matrix.columns[1] // group)
        inside = slice(matrix.columns[0] - group * first, matrix.columns[1] - group * first)
        factor = self._read_global_scale(tensors, matrix.name) if self.global_scale else None
        for rows in row_chunks(*matrix.rows, group * (last - first)):
            ranges = (rows, (first * group // 2, last * group // 2))
            shape = (matrix.outputs, matrix.inputs // 2)
            bytes_OB = tensors.read(f"{matrix.name}.{self.codes}", shape, ranges, torch.uint8)
            scales_OG = self._read_scales(tensors, matrix, rows, (first, last), factor)
            if isinstance(destination, Codes):
                part = destination.rows(rows[0] - begin, rows[1] - begin)
                part.words.view(torch.uint8).copy_(bytes_OB)
                part.scales.copy_(scales_OG)
            else:
                numbers_OGI = torch.tensor(E2M1, dtype=torch.int16)[unpack(bytes_OB, 4).int()].unflatten(1, (-1, group))
                values_OI = (numbers_OGI * scales_OG.unsqueeze(2)).flatten(1)
                destination[rows[0] - begin : rows[1] - begin].copy_(values_OI[:, inside])

    def _read_scales(
        self, tensors: TensorReader, matrix: MatrixSlice, rows: Range, groups: Range, factor: torch.Tensor | None
    ) -> torch.Tensor:
        """Scales for values times 2, (outputs, groups) float32.

        Args:
            factor: the matrix's scale, one float32; None if it has none.

        Raises:
            UserError: a scale is NaN.
        """
        shape, dtype = (matrix.outputs, matrix.inputs // self.layout.group), self._scale_dtype(tensors, matrix.name)
        stored_OG = tensors.read(f"{matrix.name}.weight_scale", shape, (rows, groups), dtype)
        bits_OG = stored_OG.view(torch.uint8)
        is_nan_OG = bits_OG == 255 if factor is None else bits_OG & 127 == 127
        if is_nan_OG.any():
            raise UserError(f"{matrix.name}.weight_scale of the checkpoint contains nan; is the file damaged?")
        if factor is None:
            return half_powers(bits_OG.int())
        scales_OG = stored_OG.view(FLOAT8).float()
        return (scales_OG / factor if self.divides else scales_OG * factor) / 2

    def _read_global_scale(self, tensors: TensorReader, name: str) -> torch.Tensor:
        """Scale of the matrix, one float32.

        Raises:
            UserError: the tensor is missing or has several numbers, or its number is not finite and above 0.
        """
        name = f"{name}.{self.global_scale}"
        shape = () if tensors.shape(name) == () else (1,)
        scale = tensors.read(name, shape, (), torch.float32).reshape(())
        if not 0 < scale < math.inf:
            raise UserError(f"{name} is {scale.item():g}; it should be finite and above 0; is the file damaged?")
        return scale

    def _scale_dtype(self, tensors: TensorReader, name: str) -> torch.dtype:
        """Stored dtype of the scales: some files have them as bytes."""
        usual = FLOAT8 if self.global_scale else torch.float8_e8m0fnu
        return torch.uint8 if tensors.dtype(f"{name}.weight_scale") == torch.uint8 else usual


NVFP4 = QuantLayout(bits=4, group=16, table="nvfp4")
PACKED_NVFP4 = Float4Format("weight_packed", NVFP4, "weight_global_scale", divides=True)
MODELOPT_NVFP4 = Float4Format("weight", NVFP4, "weight_scale_2")
PACKED_MXFP4 = Float4Format("weight_packed", QuantLayout(bits=4, group=32, table="e2m1"))
