"""Codes: whole numbers that stand for a slice of a matrix, between a checkpoint's layout and a kernel's.

A code is unsigned, and a weight is ``scale * (code - zero)``, or ``scale * code + minimum``, or the number that a table of 16 has for
the code, times the scale. Whatever order a checkpoint stores its codes in, here they are
words of 32 bits along the inputs of each output, the first input in the lowest bits, so that packing them for a kernel knows
of no format, and a format of no kernel. Codes of 5 bits are in five words for each 32 inputs, as products take them apart: each of the
last four has those of 8 inputs, the first four in the lowest bits of its bytes, and of the second four the upper 3 bits above these; their
lower 2 bits are in the first word, those that go with the second word in the lowest bits of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

Range = tuple[int, int]
"""(begin, end), the end excluded."""
CHUNK = 1 << 19
"""Weights that are in float32 at a time: 2 MB, which the second-level caches of two threads hold."""


@dataclass(frozen=True)
class CodeForm:
    """Size of codes, and how many share a scale."""

    bits: int
    """4, 5 or 8."""
    group: int = 0
    """Inputs that share a scale, counted from the first of the whole matrix: 16, 32, 64 or 128, with 5 bits 32 at least; 0 for all of
    an output."""
    has_zeros: bool = False
    """Whether each group has a zero point of its own; without, it is the middle, ``2 ** (bits - 1)``."""
    has_minima: bool = False
    """Whether each group has a minimum instead."""
    table: str = ""
    """Name of the table of the numbers that codes of 4 bits stand for, see ``packed_weight.TABLES``; empty for none."""

    @property
    def quantization(self) -> str:
        """The name under which there are functions for them: codes of 5 bits go with those of 4."""
        return "int8" if self.bits == 8 else "int4"

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def lead(self, begin: int) -> int:
        """Inputs before ``begin`` in its group."""
        return begin % self.group if self.group else 0


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Memory for the codes of some outputs and a range of inputs; the range is filled up to whole groups on both sides."""

    form: CodeForm
    columns: Range
    """The inputs that are meant."""
    words: torch.Tensor
    """(outputs, words) int32."""
    scales: torch.Tensor
    """(outputs, groups) float32; those of a table's numbers may be powers of two."""
    zeros: torch.Tensor | None
    """(outputs, groups) uint8, if the form has any."""
    minima: torch.Tensor | None = None
    """(outputs, groups) float32, if the form has any."""

    @classmethod
    def empty(cls, form: CodeForm, outputs: int, columns: Range, device: torch.device | str = "cpu") -> Codes:
        """Uninitialised memory."""
        begin, end = columns
        groups = -(-end // form.group) - begin // form.group if form.group else 1
        words = -(-(groups * form.group or end - begin) * form.bits // 32)
        return cls(
            form=form,
            columns=columns,
            words=torch.empty(outputs, words, dtype=torch.int32, device=device),
            scales=torch.empty(outputs, groups, dtype=torch.float32, device=device),
            zeros=torch.empty(outputs, groups, dtype=torch.uint8, device=device) if form.has_zeros else None,
            minima=torch.empty(outputs, groups, dtype=torch.float32, device=device) if form.has_minima else None,
        )

    def rows(self, begin: int, end: int) -> Codes:
        """Views of the same for some of the outputs."""
        return self._change(lambda tensor: tensor[begin:end])

    def clone(self) -> Codes:
        """The same codes in memory of their own."""
        return self._change(torch.clone)

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """The same with other tensors."""
        names = ("words", "scales", "zeros", "minima")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    @property
    def num_outputs(self) -> int:
        return self.words.shape[0]

    @property
    def num_inputs(self) -> int:
        """Number of the inputs that are meant."""
        return self.columns[1] - self.columns[0]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def first(self) -> int:
        """The input whose code comes first: that with which a group begins."""
        return self.columns[0] - self.lead

    @property
    def lead(self) -> int:
        """Inputs before those that are meant."""
        return self.form.lead(self.columns[0])

    @property
    def first_word(self) -> int:
        """Index of the first word that has codes of these, in rows of words that begin with input 0."""
        return self.first * self.form.bits // 32

    def word_memory(self) -> torch.Tensor:
        """Memory for words from ``first_word`` on, (outputs, words), for ``put_words``: these codes' own if they begin with one."""
        return self.words if not self._rest else self.words.new_empty(len(self.words), self.words.shape[1] + 1)

    def put_words(self, words: torch.Tensor) -> None:
        """Take codes from ``word_memory``."""
        if words is not self.words:
            size = 4 * self.words.shape[1]
            self.words.view(torch.uint8).copy_(words.view(torch.uint8)[:, self._rest : self._rest + size])

    @property
    def _rest(self) -> int:
        """Bytes of the first word that come before these codes: only those of 8 bits without groups begin inside of one."""
        return self.first * self.form.bits % 32 // 8

    def groups(self, size: int) -> Range:
        """The groups of a checkpoint that these codes lie in.

        Args:
            size: inputs of each, a multiple of this form's; 0 for all.
        """
        if not size:
            return 0, 1
        last = self.first + (self.scales.shape[1] - 1) * self.form.group
        return self.first // size, last // size + 1

    def put_groups(self, scales: torch.Tensor, zeros: torch.Tensor | None, size: int, begin: int) -> None:
        """Take scales and zero points, (outputs, groups), of a checkpoint's groups of this size from number ``begin`` on."""
        if size != self.form.group:  # a group of the checkpoint's is several of these
            index = torch.zeros(self.scales.shape[1], dtype=torch.int64)
            if size:
                index = (self.first + torch.arange(len(index)) * self.form.group) // size - begin
            scales, zeros = scales[:, index], None if zeros is None else zeros[:, index]
        self.scales.copy_(scales)
        if self.zeros is not None:
            self.zeros.copy_(zeros)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits from words or bytes along the last dimension: (…, W) int32 → (…, W · 32 / bits) uint8. The first code is
    in the lowest bits."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    pairs = codes.to(torch.int16)  # a byte's second code goes into the byte above it
    return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)


def row_chunks(begin: int, end: int, columns: int) -> Iterator[Range]:
    """Ranges of rows with about ``CHUNK`` numbers each."""
    step = max(1, CHUNK // max(1, columns))
    return ((first, min(first + step, end)) for first in range(begin, end, step))
