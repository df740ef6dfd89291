"""AWQ (Lin et al. 2023, arXiv:2306.00978) as AutoAWQ's ``gemm`` version stores it.

For a matrix of codes q, scales s and zero points z, W[n, k] = s[g, n] · (q[n, k] - z[g, n]) with g = k / group size:

- ``qweight`` int32 (inputs, outputs / 8) and ``qzeros`` int32 (groups, outputs / 8): words along the outputs; of the eight in a
  word, output ``AWQ_ORDER[i]`` is in bits 4i to 4i + 3
- ``scales`` (groups, outputs)

Source: casper-hansen/AutoAWQ, awq/utils/packing_utils.py and awq/modules/linear/gemm.py.
"""

from __future__ import annotations

import torch

from labinfer.weights.codes import Codes, unpack
from labinfer.weights.formats.coded import CodedFormat, TensorSpec
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.settings import Excluded, Settings, is_table
from labinfer.weights.loading import AWQ_ORDER
from labinfer.weights.slices import MatrixSlice, Range

PER_WORD = 8
INPUTS = 128
"""Number of inputs that are transposed at a time: one cache line of each output."""


class AwqFormat(CodedFormat):
    """AWQ: quantized values of 4 bits with zero points."""

    suffixes = ("qweight", "qzeros", "scales")
    zeros = "qzeros"

    def __init__(self, group: int):
        super().__init__(bits=4, group=group, has_zeros=True)

    def specs(self, matrix: MatrixSlice) -> dict[str, TensorSpec]:
        groups, words = self.num_groups(matrix.inputs), -(-matrix.outputs // PER_WORD)
        return {
            "qweight": ((matrix.inputs, words), torch.int32),
            "qzeros": ((groups, words), torch.int32),
            "scales": ((groups, matrix.outputs), torch.float32),
        }

    def read_words(self, tensors: TensorReader, matrix: MatrixSlice, codes: Codes) -> None:
        (begin, end), shape = matrix.rows, self.specs(matrix)["qweight"][0]
        inputs = (codes.first, min(codes.first + codes.words.shape[1] * PER_WORD, matrix.inputs))
        ranges = (inputs, (begin // PER_WORD, -(-end // PER_WORD)))
        skipped, is_whole = begin % PER_WORD, begin % PER_WORD == end % PER_WORD == 0
        for first, piece in tensors.pieces(f"{matrix.name}.qweight", shape, ranges, unit=INPUTS):
            words = codes.words[:, first // PER_WORD : -(-(first + len(piece)) // PER_WORD)]
            outputs = words if is_whole else words.new_empty(piece.shape[1] * PER_WORD, words.shape[1])
            tensors.functions.transpose_awq(piece, outputs)
            if not is_whole:
                words.copy_(outputs[skipped : skipped + end - begin])
        codes.words[:, -(-(inputs[1] - inputs[0]) // PER_WORD) :] = 0

    def read_scales(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        return self.read_tensor(tensors, matrix, "scales", groups, matrix.rows).T

    def read_zeros(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        first, last = matrix.rows
        packed = self.read_tensor(tensors, matrix, "qzeros", groups, (first // PER_WORD, -(-last // PER_WORD)))
        zeros = unpack(packed, 4).view(len(packed), -1, PER_WORD)[:, :, torch.tensor(AWQ_ORDER).argsort()].flatten(1)
        return zeros[:, first % PER_WORD :][:, : last - first].T


def read_awq(settings: Settings) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` awq."""
    settings.choose("version", ("gemm", "GEMM"), "gemm")
    settings.choose("w_bit" if "w_bit" in settings.values else "bits", (4,), 4)
    settings.choose("zero_point", (True,), True)
    group = settings.group_size("q_group_size" if "q_group_size" in settings.values else "group_size", 128)
    plain, awq, excluded = PlainFormat(), AwqFormat(group), Excluded(settings.names("modules_to_not_convert"))

    def choose(matrix: str) -> Format:
        left_out = is_table(matrix) or matrix.endswith("lm_head") or excluded.matches(matrix)
        return plain if left_out else awq

    return choose
