"""GgufForm: form in memory of a matrix in a GGUF file, that is, the quantized values of its blocks with scales and minima."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.weights.codes import Codes, QuantLayout
from labinfer.weights.formats.format import Formats
from labinfer.weights.gguf.blocks import decode_numbers
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.header import GgufTensor
from labinfer.weights.gguf.types import BlockType

FIVE_BITS = QuantLayout(bits=5, group=32, has_minima=True)
TABLE_4 = QuantLayout(bits=4, group=32, table="iq4")
FORMS = {
    "Q2_K": QuantLayout(bits=4, group=16, has_minima=True),
    "Q3_K": QuantLayout(bits=4, group=16),
    "IQ1_S": QuantLayout(bits=5, group=32),
    "IQ1_M": QuantLayout(bits=8, group=16),
    "IQ2_XXS": QuantLayout(bits=8, group=32),
    "IQ2_XS": QuantLayout(bits=8, group=16),
    "IQ2_S": QuantLayout(bits=8, group=16),
    "IQ3_XXS": QuantLayout(bits=8, group=32),
    "IQ3_S": QuantLayout(bits=5, group=32),
    "TQ1_0": QuantLayout(bits=4, group=128),
    "TQ2_0": QuantLayout(bits=4, group=128),
    "Q4_0": QuantLayout(bits=4, group=32),
    "Q4_1": QuantLayout(bits=4, group=32, has_minima=True),
    "Q5_0": QuantLayout(bits=5, group=32),
    "Q5_1": FIVE_BITS,
    "Q8_0": QuantLayout(bits=8, group=32),
    "Q4_K": QuantLayout(bits=4, group=32, has_minima=True),
    "Q5_K": FIVE_BITS,
    "Q6_K": QuantLayout(bits=8, group=16),
    "IQ4_NL": TABLE_4,
    "IQ4_XS": TABLE_4,
    "MXFP4": QuantLayout(bits=4, group=32, table="e2m1"),
}


class GgufForm:
    """Form in memory (quantized values or floating point) of a matrix of a GGUF file; see ``MatrixForm``.

    Args:
        form: form of its quantized values; None for floating point.
    """

    def __init__(self, form: QuantLayout | None = None):
        self._form = form

    def form(self, quantization: str) -> QuantLayout | None:
        return None if quantization == "none" else self._form

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return (f"{matrix}.weight",)


def make_formats(file: GgufFile, find: Callable[[str], tuple[GgufTensor, int] | None]) -> Formats:
    """Form in memory of each matrix of a GGUF file.

    Args:
        find: returns the tensor of a matrix, and the minimum number of columns that stay adjacent under its column order (0 for all).
    """
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    coded = sorted(kinds.intersection(FORMS))

    def choose(matrix: str) -> GgufForm:
        if (place := find(matrix)) is None:
            return GgufForm()
        tensor, run = place
        form = FORMS.get(tensor.type.name)
        is_split = form is not None and run % form.group  # the column order would divide groups
        return GgufForm(None if is_split else form)

    return Formats(choose, {"quant_method": "gguf", "types": coded} if coded else None, path=str(file.path))


def take(numbers_RI: torch.Tensor, columns_I: torch.Tensor) -> torch.Tensor:
    """Columns ``columns_I`` of a matrix, in that order; a view if they are adjacent."""
    first = int(columns_I[0])
    if bool((columns_I.diff() == 1).all()):
        return numbers_RI[:, first : first + len(columns_I)]
    return numbers_RI[:, columns_I]


def put_codes(block_type: BlockType, blocks_RNB: torch.Tensor, columns_I: torch.Tensor, codes: Codes) -> None:
    """Fill ``codes`` from the GGUF blocks of the rows, and put the columns in another order.

    Args:
        blocks_RNB: (rows, blocks, bytes) uint8.
        columns_I: value i of a row of ``codes`` is value ``columns_I[i]`` of that row in ``blocks_RNB``. The values of a group are
            adjacent in both orders.
    """
    rows, form = len(blocks_RNB), codes.form
    numbers = decode_numbers(block_type, blocks_RNB.reshape(-1, blocks_RNB.shape[-1]))
    bytes_OB = codes.words.view(torch.uint8)
    whole, groups = (
        numbers.whole_NS if numbers.codes_NS is None else numbers.codes_NS,
        columns_I[:: form.group] // form.group,
    )
    is_unsigned = form.has_minima or form.table
    whole = (take(whole.view(rows, -1), columns_I) + (0 if is_unsigned else form.middle)).to(torch.uint8)
    bytes_OB.copy_(pack_numbers(whole, form.bits))
    codes.scales.copy_(numbers.scales_NG.view(rows, -1)[:, groups])
    if form.has_minima:
        codes.minima.copy_(numbers.minima_NG.view(rows, -1)[:, groups])


def pack_numbers(numbers_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers into the bytes of ``Codes.words``: (outputs, inputs) uint8, whole groups → (outputs, inputs · bits / 8) uint8."""
    if bits == 8:
        return numbers_OI
    if bits == 4:
        return numbers_OI[:, 0::2] | numbers_OI[:, 1::2] << 4
    first, second = numbers_OI.unflatten(1, (-1, 4, 2, 4)).unbind(3)
    lower = sum((second[:, :, word] & 3) << 2 * word for word in range(4))
    return torch.cat([lower.unsqueeze(2), first | second >> 2 << 5], dim=2).flatten(1)
