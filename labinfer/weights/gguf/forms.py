"""Forms in which the matrices of GGUF files are held: the numbers of a block as they are, where kernels have such a form.

Kernels know numbers of 4 or 8 bits with a scale for each 16, 32, 64 or 128 inputs, and no minima. So types with minima, whose values
are decoded, are rounded to int8 by their own groups: a step of these is about a 17th of one of Q4_K's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.weights.codes import CodeForm, Codes
from labinfer.weights.formats.format import Formats
from labinfer.weights.gguf.blocks import decode_numbers
from labinfer.weights.gguf.file import GgufFile, GgufTensor
from labinfer.weights.gguf.types import BlockType
from labinfer.weights.loading import LoadFunctions

BY_32 = CodeForm(bits=8, group=32)
FORMS = {
    "Q4_0": CodeForm(bits=4, group=32),
    "Q5_0": BY_32,
    "Q8_0": BY_32,
    "Q6_K": CodeForm(bits=8, group=16),
    "IQ4_NL": BY_32,
    "IQ4_XS": BY_32,
    "MXFP4": BY_32,
}
"""Types whose numbers are codes as they are."""
ROUNDED = {"Q4_1": BY_32, "Q5_1": BY_32, "Q4_K": BY_32, "Q5_K": BY_32}
"""Types with minima."""
TABLE = "embed_tokens"
"""Last part of the name of the table of token embeddings: no functions take rows of codes."""


class GgufForm:
    """The form in which a matrix of a GGUF file is held; see ``MatrixForm``.

    Args:
        form: of its codes; None where it has values.
    """

    def __init__(self, form: CodeForm | None = None):
        self._form = form

    def form(self, quantization: str) -> CodeForm | None:
        return None if quantization == "none" else self._form

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return (f"{matrix}.weight",)


def make_formats(file: GgufFile, find: Callable[[str], tuple[GgufTensor, int] | None]) -> Formats:
    """The form in which each matrix of a file is held.

    Args:
        find: the tensor in which a matrix of the checkpoint is, and how many columns at least stay side by side; 0 for all.
    """
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    coded = sorted(kinds.intersection(FORMS | ROUNDED))
    notes = []
    if rounded := [kind for kind in coded if kind in ROUNDED]:
        notes.append(
            f"matrices of type {' and '.join(rounded)} are rounded to int8 by groups of 32, as kernels know no minima, see "
            "docs/gguf.md; --quantization none keeps their values"
        )

    def choose(matrix: str) -> GgufForm:
        if (place := find(matrix)) is None:
            return GgufForm()
        tensor, run = place
        form = (FORMS | ROUNDED).get(tensor.type.name)
        is_split = form is not None and run % form.group  # by an order of columns
        return GgufForm(None if is_split or matrix.endswith(TABLE) else form)

    return Formats(choose, {"quant_method": "gguf", "types": coded} if coded else None, notes, str(file.path))


def take(numbers_RI: torch.Tensor, columns_I: torch.Tensor) -> torch.Tensor:
    """Columns of numbers; a view where they are side by side."""
    first = int(columns_I[0])
    if bool((columns_I.diff() == 1).all()):
        return numbers_RI[:, first : first + len(columns_I)]
    return numbers_RI[:, columns_I]


def put_codes(
    functions: LoadFunctions, block_type: BlockType, blocks_RNB: torch.Tensor, columns_I: torch.Tensor, codes: Codes
) -> None:
    """Fill codes from blocks of as many rows.

    Args:
        blocks_RNB: (rows, blocks, bytes) uint8.
        columns_I: places of the codes among the numbers of a row's blocks; those of a group are side by side.
    """
    rows, form = len(blocks_RNB), codes.form
    numbers = decode_numbers(block_type, blocks_RNB.reshape(-1, blocks_RNB.shape[-1]))
    bytes_OB = codes.words.view(torch.uint8)
    if block_type.name in ROUNDED:
        values = take(numbers.values_NS.view(rows, -1), columns_I).contiguous()
        functions.round_groups(values, bytes_OB, codes.scales, group=form.group, lead=0)
        return
    whole = (take(numbers.whole_NS.view(rows, -1), columns_I) + form.middle).to(torch.uint8)
    bytes_OB.copy_(whole if form.bits == 8 else whole[:, 0::2] | whole[:, 1::2] << 4)
    codes.scales.copy_(numbers.scales_NG.view(rows, -1)[:, columns_I[:: form.group] // form.group])
