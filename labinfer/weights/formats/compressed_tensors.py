"""compressed-tensors, the format that llm-compressor writes: a scheme for each group of modules.

- ``pack-quantized``: ``weight_packed`` int32 (outputs, inputs · bits / 32), codes along the inputs, the first in the lowest bits;
  ``weight_scale`` (outputs, groups); ``weight_zero_point`` int32 (outputs · bits / 32, groups), packed along the outputs
- ``int-quantized``: ``weight`` int8 (outputs, inputs), ``weight_scale``, ``weight_zero_point`` int8 (outputs, groups)
- ``float-quantized``, ``mxfp8-quantized``: FP8, see ``fp8.py``
- ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``: floats of 4 bits, see ``float4.py``

Packed values are unsigned: signed values plus 2^(bits - 1). W = (q - z) · scale.

Source: vllm-project/compressed-tensors, compressors/ and quantization/.
"""

from __future__ import annotations

import torch

from labinfer.weights.codes import Codes
from labinfer.weights.formats.coded import CodedFormat, TensorSpec, read_packed
from labinfer.weights.formats.float4 import PACKED_MXFP4, PACKED_NVFP4
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.fp8 import MX_BLOCK, Fp8Format, read_block
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.reordered import choose_order
from labinfer.weights.formats.settings import Settings, Targets, is_table
from labinfer.weights.slices import MatrixSlice, Range, TensorSlice

ORDER = "weight_g_idx"
FLOATS = {
    "nvfp4-pack-quantized": (PACKED_NVFP4, 4, "tensor_group"),
    "mxfp4-pack-quantized": (PACKED_MXFP4, 4, "group"),
    "mxfp8-quantized": (Fp8Format(MX_BLOCK), 8, "group"),
}
"""Format, bits and strategy of layouts with floats in groups whose size the layout determines."""
LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *FLOATS)


class PackedFormat(CodedFormat):
    """``pack-quantized``: weights of 4 or 8 bits, activations of 16 bits (W4A16, W8A16)."""

    zeros, symmetric = "weight_zero_point", "symmetric"
    suffixes = ("weight_packed", "weight_scale", zeros, "weight_shape", ORDER, "input_scale")

    def __init__(self, bits: int, group: int, symmetric: bool):
        super().__init__(bits, group, has_zeros=not symmetric)
        self._per_word = 32 // bits

    def specs(self, matrix: MatrixSlice) -> dict[str, TensorSpec]:
        groups = self.num_groups(matrix.inputs)
        specs = {
            "weight_packed": ((matrix.outputs, -(-matrix.inputs // self._per_word)), torch.int32),
            "weight_scale": ((matrix.outputs, groups), torch.float32),
        }
        if self.own_form.has_zeros:
            specs[self.zeros] = ((-(-matrix.outputs // self._per_word), groups), torch.int32)
        return specs

    def read_words(self, tensors: TensorReader, matrix: MatrixSlice, codes: Codes) -> None:
        shape, words = self.specs(matrix)["weight_packed"][0], codes.word_memory()
        size = min(words.shape[1], shape[1] - codes.first_word)
        ranges = (matrix.rows, (codes.first_word, codes.first_word + size))
        name = f"{matrix.name}.weight_packed"
        tensors.read_into(TensorSlice(name=name, shape=shape, ranges=ranges, destination=words[:, :size]))
        words[:, size:] = 0
        codes.put_words(words)

    def read_scales(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        return self.read_tensor(tensors, matrix, "weight_scale", matrix.rows, groups)

    def read_zeros(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        def read(words: Range) -> torch.Tensor:
            shape = -(-matrix.outputs // self._per_word), self.num_groups(matrix.inputs)
            return tensors.read(f"{matrix.name}.{self.zeros}", shape, (words, groups), torch.int32)

        return read_packed(read, matrix.rows, self.own_form.bits)


class IntFormat(CodedFormat):
    """``int-quantized``: weights and activations of 8 bits (W8A8). The kernel quantizes activations on the fly.

    Args:
        whole: whether one scale applies to the whole matrix.
    """

    zeros, symmetric = "weight_zero_point", "symmetric"
    suffixes = ("weight", "weight_scale", zeros, "input_scale", "input_zero_point")

    def __init__(self, group: int, symmetric: bool, whole: bool):
        super().__init__(8, group, has_zeros=not symmetric)
        self._whole = whole

    def specs(self, matrix: MatrixSlice) -> dict[str, TensorSpec]:
        shape = self._groups_shape(matrix)
        specs = {"weight": ((matrix.outputs, matrix.inputs), torch.int8), "weight_scale": (shape, torch.float32)}
        return specs | ({self.zeros: (shape, torch.int8)} if self.own_form.has_zeros else {})

    def read_words(self, tensors: TensorReader, matrix: MatrixSlice, codes: Codes) -> None:
        end = min(codes.first + codes.words.shape[1] * 4, matrix.inputs if codes.form.group else matrix.columns[1])
        name, numbers = f"{matrix.name}.weight", codes.words.view(torch.int8)
        tensors.read_into(
            TensorSlice(
                name=name,
                shape=(matrix.outputs, matrix.inputs),
                ranges=(matrix.rows, (codes.first, end)),
                destination=numbers[:, : end - codes.first],
            )
        )
        numbers[:, end - codes.first :] = 0
        codes.words.bitwise_xor_(-0x7F7F7F80)  # 0x80808080: adds 128 to each of the four codes of a word

    def read_scales(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        return self._read_groups(tensors, matrix, "weight_scale", groups, torch.float32)

    def read_zeros(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        zeros = self._read_groups(tensors, matrix, self.zeros, groups, torch.int8)
        return (zeros.int() + self.own_form.middle).to(torch.uint8)

    def _read_groups(
        self, tensors: TensorReader, matrix: MatrixSlice, suffix: str, groups: Range, dtype: torch.dtype
    ) -> torch.Tensor:
        """Read groups ``groups`` of the tensor with ``suffix``, for the slice's outputs: (outputs, groups)."""
        name, shape = f"{matrix.name}.{suffix}", self._groups_shape(matrix)
        if self._whole:
            return tensors.read(name, shape, (), dtype).expand(matrix.rows[1] - matrix.rows[0], 1)
        return tensors.read(name, shape, (matrix.rows, groups), dtype)

    def _groups_shape(self, matrix: MatrixSlice) -> tuple[int, ...]:
        return (1,) if self._whole else (matrix.outputs, self.num_groups(matrix.inputs))


def read_compressed_tensors(settings: Settings) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` compressed-tensors."""
    if settings.get("sparsity_config", dict, {}):
        settings.inner("sparsity_config").choose("format", ("dense",), "dense")
    plain, ignored = PlainFormat(), Targets(settings.names("ignore"))
    schemes: list[tuple[Targets, FormatByName]] = []
    groups = settings.inner("config_groups")
    for name in groups.values:
        group = groups.inner(name)
        schemes.append((Targets(group.names("targets")), _read_scheme(group, settings)))

    def choose(matrix: str) -> Format:
        if is_table(matrix) or ignored.matches(matrix):
            return plain
        named = (scheme for targets, scheme in schemes if targets.matches(matrix))
        linear = (scheme for targets, scheme in schemes if targets.has_linear)
        scheme = next(named, None) or next(linear, None)
        return scheme(matrix) if scheme else plain

    return choose


def _read_scheme(group: Settings, settings: Settings) -> FormatByName:
    """Format of the matrices in one entry of ``config_groups``, a group of modules.

    Raises:
        UserError: the scheme is not supported.
    """
    layout = (group if group.values.get("format") else settings).choose("format", LAYOUTS)
    weights = group.inner("weights")
    if layout in FLOATS:
        floats, bits, strategy = FLOATS[layout]
        weights.choose("type", ("float",))
        weights.choose("num_bits", (bits,))
        weights.choose("strategy", (strategy,))
        return lambda matrix: floats
    is_packed, is_float = layout == "pack-quantized", layout == "float-quantized"
    types = ("int",) if is_packed else ("float",) if is_float else ("int", "float")
    if weights.choose("type", types, "int") == "float":
        weights.choose("num_bits", (8,))
        strategy = weights.choose("strategy", ("tensor", "channel", "block"))
        float8 = Fp8Format(read_block(weights, "block_structure") if strategy == "block" else None)
        return lambda matrix: float8
    strategy = weights.choose("strategy", ("channel", "group") if is_packed else ("tensor", "channel", "group"))
    size = weights.group_size("group_size", 128) if strategy == "group" else 0
    bits, symmetric = weights.choose("num_bits", (4, 8) if is_packed else (8,)), weights.get("symmetric", bool, True)
    order = weights.choose("actorder", (None, "weight", "static", *(("group",) if is_packed else ())))
    if not is_packed:
        whole = IntFormat(size, symmetric, whole=strategy == "tensor")
        return lambda matrix: whole
    packed = PackedFormat(bits, size, symmetric)
    return choose_order(settings, packed, ORDER) if order == "group" else lambda matrix: packed
