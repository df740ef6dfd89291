"""FP8: values of 8 bits (e4m3: Micikevicius et al. 2022, arXiv:2209.05433) with a scale for each block, output or matrix.

W = q · scale; ``weight`` is F8_E4M3 (outputs, inputs), and its scale (blocks of outputs, blocks of inputs), (outputs) or a
single number, of any float type or e8m0 (powers of two, also stored as bytes). The last blocks may be partial. No kernel uses FP8
values directly: they are dequantized to the stage's dtype, or, with ``--quantization int8``, requantized with a scale for each 128
inputs of an output. Activation scales are not read, as kernels compute them per token.

Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md and inference/kernel.py; transformers/integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import QuantLayout, Range
from labinfer.weights.formats.decoded import ROUNDED, Decode, DecodedFormat
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.settings import Excluded, Settings, is_table
from labinfer.weights.slices import MatrixSlice

FLOAT8 = torch.float8_e4m3fn
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
"""Name suffixes of the scales: DeepSeek's, llm-compressor's, DeepSeek V4's, Mistral's. Scales named ``weight_scale_inv`` are
factors as all others."""
ACTIVATIONS = ("input_scale", "activation_scale", "qscale_act")
POWERS = (torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales that are stored as exponents with a bias of 127."""
USUAL_BLOCK = (128, 128)
MX_BLOCK = (1, 32)
"""Block of MXFP8 (OCP Microscaling Formats 1.0, 5.3.1), whose scales are powers of two."""


class Fp8Format(DecodedFormat):
    """Matrix in FP8, or in floating point if it was left unquantized without being listed in the config.

    Args:
        block: (outputs, inputs) of a block; None for a scale per output or per matrix, depending on the shape of the scales.
        is_certain: whether the config declares blocks. If not, ``block`` is a default, and scales per output or per matrix are also
            accepted.
        may_round: whether the matrix may be requantized to int8.
    """

    def __init__(self, block: tuple[int, int] | None, is_certain: bool = True, may_round: bool = True):
        self._block, self._is_certain, self._may_round = block, is_certain, may_round

    def form(self, quantization: str) -> QuantLayout | None:
        return ROUNDED if quantization == "int8" and self._may_round else None

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return tuple(f"{matrix}.{suffix}" for suffix in ("weight", *SCALES, *ACTIVATIONS))

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        shape = (matrix.outputs, matrix.inputs)
        if self._is_plain(tensors, matrix):
            tensors.expect(f"{matrix.name}.weight", shape, torch.float32)
        else:
            tensors.expect(f"{matrix.name}.weight", shape, FLOAT8)
            name, shape, _, _ = self._scales(tensors, matrix)
            if self._block is not None and shape[0] < matrix.outputs:
                _check_stack(matrix, self._block[0], name)
            stored = tensors.dtype(name)
            tensors.expect(name, shape, stored if stored in POWERS else torch.float32)

    def pieces(self, tensors: TensorReader, matrix: MatrixSlice) -> Iterator[tuple[Range, Decode]]:
        if self._is_plain(tensors, matrix):
            scales_OG, group = None, 0
        else:
            scales_OG, group = self._read_scales(tensors, matrix)
        shape, ranges = (matrix.outputs, matrix.inputs), (matrix.rows, matrix.columns)
        for first, stored in tensors.pieces(f"{matrix.name}.weight", shape, ranges):

            def decode(begin: int, end: int, out_OI: torch.Tensor, first: int = first, stored: torch.Tensor = stored):
                part = stored[begin - first : end - first]
                if scales_OG is None:
                    out_OI.copy_(part)
                else:
                    lead, numbers = matrix.columns[0] % group, part.view(torch.uint8)
                    tensors.functions.decode(
                        numbers, scales_OG[begin:end], None, out_OI, bits=8, group=group, lead=lead, is_float=True
                    )

            yield (first, first + len(stored)), decode

    def _is_plain(self, tensors: TensorReader, matrix: MatrixSlice) -> bool:
        """Whether the tensor of the matrix is not FP8 and the matrix has no scales."""
        has_scales = any(tensors.shape(f"{matrix.name}.{suffix}") is not None for suffix in SCALES)
        return not has_scales and tensors.dtype(f"{matrix.name}.weight") not in (FLOAT8, torch.float8_e5m2)

    def _scales(self, tensors: TensorReader, matrix: MatrixSlice) -> tuple[str, tuple[int, ...], int, int]:
        """Expected name and shape of the scales, and the numbers of outputs and inputs that share a scale."""
        names, outputs, inputs = [f"{matrix.name}.{suffix}" for suffix in SCALES], matrix.outputs, matrix.inputs
        name = next((name for name in names if tensors.shape(name) is not None), names[0])
        stored = tensors.shape(name)
        if self._block is None or not self._is_certain:
            if stored in ((), (1,), (1, 1)):
                return name, stored, outputs, inputs
            if self._block is None or stored in ((outputs,), (outputs, 1)):
                return name, (outputs,) if stored == (outputs,) else (outputs, 1), 1, inputs
        height, width = self._block
        return name, (-(-outputs // height), -(-inputs // width)), height, width

    def _read_scales(self, tensors: TensorReader, matrix: MatrixSlice) -> tuple[torch.Tensor, int]:
        """Scales of the slice, (outputs, groups of inputs) float32, and the group size along the inputs."""
        name, shape, height, width = self._scales(tensors, matrix)
        dtype = tensors.dtype(name)
        if dtype in POWERS:
            scales = (tensors.read(name, shape, (), dtype).view(torch.uint8).double() - 127).exp2().float()
        else:
            scales = tensors.read(name, shape, (), torch.float32)
        scales, (first, last) = scales.reshape(shape[0] if shape else 1, -1), matrix.columns
        return scales[:, first // width : -(-last // width)][torch.arange(*matrix.rows) // height], width


def read_mxfp8(settings: Settings) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` mxfp8."""
    return read_fp8(settings, MX_BLOCK)


def read_fp8(settings: Settings, usual_block: tuple[int, int] = USUAL_BLOCK) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` fp8.

    Args:
        usual_block: (outputs, inputs) of a block if the config does not declare it.
    """
    settings.choose("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.choose("activation_scheme", ("dynamic", "static"), "dynamic")
    settings.choose("expert_dtype", ("fp8",), "fp8")
    is_certain = "weight_block_size" in settings.values
    block = read_block(settings, "weight_block_size") if is_certain else usual_block
    plain, fp8 = PlainFormat(), Fp8Format(block, is_certain)
    head = Fp8Format(block, is_certain, may_round=False)  # often unquantized although the config does not list it
    excluded = Excluded((*settings.names("modules_to_not_convert"), *settings.names("ignored_layers")))

    def choose(matrix: str) -> Format:
        if is_table(matrix) or excluded.matches(matrix):
            return plain
        return head if matrix.endswith("lm_head") else fp8

    return choose


def _check_stack(matrix: MatrixSlice, height: int, name: str) -> None:
    """Refuse a matrix of fused projections (gate and up) if a block of ``height`` rows has rows of both.

    Raises:
        UserError: a block has rows of both projections, or may have rows of both.
    """
    outputs, stack = matrix.outputs, matrix.stack
    if stack is not None and stack.shape[1] > outputs and 2 * outputs > height and outputs % height:
        raise UserError(
            f"{name}: gate and up of {outputs} rows each are not a multiple of the block height {height}, so the "
            "blocks of up cannot be located; only checkpoints with separate gate and up tensors are supported"
        )


def read_block(settings: Settings, key: str) -> tuple[int, int] | None:
    """Number of outputs and of inputs in a block, from the list ``key``; None if the key is missing.

    Raises:
        UserError: the value is not a pair of positive integers.
    """
    block = settings.get(key, list, None)
    if block is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise UserError(f"{key} should be two positive numbers such as [128, 128], not {block!r:.60}")
    return block[0], block[1]
