"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) as AutoGPTQ and GPTQModel store it.

For a matrix of codes q, scales s and zero points z, W[n, k] = s[g, n] · (q[n, k] - z[g, n]), where g is the group of input k:

- ``qweight`` int32 (inputs · bits / 32, outputs): codes along the inputs, the first in the lowest bits
- ``qzeros`` int32 (groups, outputs · bits / 32): zero points along the outputs; less one, modulo 2^bits, in ``gptq`` files
- ``scales`` (groups, outputs)
- ``g_idx`` int32 (inputs): the group of each input; with ``desc_act`` in any order, otherwise inputs / group size

Source: ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py and utils/model.py.
"""

from __future__ import annotations

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import Codes
from labinfer.weights.formats.coded import CodedFormat, TensorSpec, read_packed
from labinfer.weights.formats.format import Format, FormatByName, TensorReader
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.reordered import choose_order, is_in_order
from labinfer.weights.formats.settings import Excluded, Settings, is_table, pattern
from labinfer.weights.slices import MatrixSlice, Range

ORDER = "g_idx"
WORDS = 16
"""Number of words along the inputs that are transposed at a time: one cache line of each output."""


class GptqFormat(CodedFormat):
    """GPTQ with groups of consecutive inputs, that is, without act-order.

    Args:
        one_less: whether zero points are stored minus one.
    """

    suffixes = ("qweight", "qzeros", "scales", ORDER)
    zeros = "qzeros"

    def __init__(self, bits: int, group: int, symmetric: bool, one_less: bool):
        super().__init__(bits, group, has_zeros=not symmetric)
        self._one_less = one_less

    def specs(self, matrix: MatrixSlice) -> dict[str, TensorSpec]:
        groups, per_word = self.num_groups(matrix.inputs), 32 // self.own_form.bits
        return {
            "qweight": ((-(-matrix.inputs // per_word), matrix.outputs), torch.int32),
            "qzeros": ((groups, -(-matrix.outputs // per_word)), torch.int32),
            "scales": ((groups, matrix.outputs), torch.float32),
        }

    def read_words(self, tensors: TensorReader, matrix: MatrixSlice, codes: Codes) -> None:
        shape, words = self.specs(matrix)["qweight"][0], codes.word_memory()
        end = min(codes.first_word + words.shape[1], shape[0])
        ranges = ((codes.first_word, end), matrix.rows)
        for first, piece in tensors.pieces(f"{matrix.name}.qweight", shape, ranges, unit=WORDS):
            tensors.functions.transpose_words(piece, words[:, first : first + len(piece)])
        words[:, end - codes.first_word :] = 0
        codes.put_words(words)

    def read_scales(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        return self.read_tensor(tensors, matrix, "scales", groups, matrix.rows).T

    def read_zeros(self, tensors: TensorReader, matrix: MatrixSlice, groups: Range) -> torch.Tensor:
        bits = self.own_form.bits
        zeros = read_packed(
            lambda words: self.read_tensor(tensors, matrix, "qzeros", groups, words).T, matrix.rows, bits
        )
        return (zeros + 1) & ((1 << bits) - 1) if self._one_less else zeros

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        super().check(tensors, matrix)
        name = f"{matrix.name}.{ORDER}"
        if tensors.shape(name) is not None and not is_in_order(tensors, name, self.group or matrix.inputs):
            raise UserError(
                f"tensor {name} permutes the inputs (act-order), although quantization_config in config.json says "
                "desc_act false; set it to true"
            )


def read_gptq(settings: Settings) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` gptq."""
    version = settings.choose("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.choose("is_marlin_format", (False,), False)
    settings.choose("pack_dtype", ("int32",), "int32")

    def read(own: Settings) -> FormatByName:
        ordered = GptqFormat(
            own.choose("bits", (4, 8)),
            own.group_size("group_size", 128),
            own.get("sym", bool, True),
            one_less=version == "gptq",
        )
        return choose_order(settings, ordered, ORDER) if own.get("desc_act", bool, False) else lambda matrix: ordered

    plain, usual = PlainFormat(), read(settings)
    rules = settings.inner("dynamic") if settings.get("dynamic", dict, {}) else Settings({})
    special = [
        (pattern(rule[2:] if rule[:2] in ("-:", "+:") else rule), None if rule.startswith("-:") else read(own))
        for rule in rules.values
        for own in [rules.inner(rule, defaults=settings)]
    ]
    head, excluded = settings.get("lm_head", bool, False), Excluded(settings.names("modules_to_not_convert"))

    def choose(matrix: str) -> Format:
        if is_table(matrix) or (matrix.endswith("lm_head") and not head) or excluded.matches(matrix):
            return plain
        rule = next((own for rule, own in special if rule.match(matrix)), usual)
        return plain if rule is None else rule(matrix)

    return choose
