"""Codes: quantized values (unsigned integers) of a matrix slice, in one order for all checkpoint formats and kernels.

A weight is ``scale * (code - zero)``, or ``scale * code + minimum``, or ``scale * table[code]`` with a table of 16 numbers. Codes
are stored in words of 32 bits along the inputs of each output, the first input in the lowest bits. A format converts a checkpoint's
order to this one, and a kernel's packing converts it to the kernel's own order.

Codes of 5 bits take five words for each 32 inputs, in the order in which kernels unpack them. Words 1 to 4 hold 8 inputs each: byte
i of a word has the code of the word's input i in its lower 5 bits, and in its upper 3 bits the upper 3 bits of the code of input i
+ 4. Word 0 has the lower 2 bits of the codes of inputs 4 to 7: its byte i has those for input i + 4 of word w in bits 2w - 2 and 2w
- 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

Range = tuple[int, int]
"""Half-open range (begin, end)."""
CHUNK = 1 << 19
"""Number of weights that are converted to float32 at a time: 2 MB, which the L2 caches of two threads hold."""


@dataclass(frozen=True)
class QuantLayout:
    """Form of quantized weights in memory: bits, group size, zero points or minima."""

    bits: int
    """Bits of a code: 4, 5 or 8."""
    group: int = 0
    """Group size (inputs that share a scale), counted from the first input of the whole matrix: 16, 32, 64 or 128 (at least 32 with 5
    bits); 0 for one scale per output."""
    has_zeros: bool = False
    """Whether each group has a zero point. Otherwise the zero point is the middle, ``2 ** (bits - 1)``."""
    has_minima: bool = False
    """Whether each group has a minimum instead of a zero point."""
    table: str = ""
    """Name of the lookup table for codes of 4 bits, see ``packed_weight.TABLES``; empty for none."""

    @property
    def quantization(self) -> str:
        """Quantization name under which functions are registered; 5-bit codes use functions for ``int4``."""
        return "int8" if self.bits == 8 else "int4"

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def lead(self, begin: int) -> int:
        """Number of inputs before ``begin`` in its group."""
        return begin % self.group if self.group else 0


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Memory for the codes (quantized values) of some outputs and a range of inputs, extended at both ends to whole groups."""

    form: QuantLayout
    columns: Range
    """Requested range of inputs."""
    words: torch.Tensor
    """Codes in words, (outputs, words) int32."""
    scales: torch.Tensor
    """Scales of the groups, (outputs, groups) float32. If codes index a table (MXFP4), scales may be powers of two."""
    zeros: torch.Tensor | None
    """Zero points of the groups, (outputs, groups) uint8; None if the form has none."""
    minima: torch.Tensor | None = None
    """Minima of the groups, (outputs, groups) float32; None if the form has none."""

    @classmethod
    def empty(cls, form: QuantLayout, outputs: int, columns: Range, device: torch.device | str = "cpu") -> Codes:
        """Make codes of ``outputs`` outputs and the inputs ``columns``, in uninitialized memory."""
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
        """Codes of the outputs ``begin`` to ``end`` (exclusive), as views of this memory."""
        return self._change(lambda tensor: tensor[begin:end])

    def clone(self) -> Codes:
        """Copy of the codes, in memory of its own."""
        return self._change(torch.clone)

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """Copy of these codes with each tensor replaced by ``change(tensor)``."""
        names = ("words", "scales", "zeros", "minima")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    @property
    def num_outputs(self) -> int:
        return self.words.shape[0]

    @property
    def num_inputs(self) -> int:
        """Number of requested inputs, without the extension to whole groups."""
        return self.columns[1] - self.columns[0]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def first(self) -> int:
        """First stored input: the first of the group of ``columns[0]``."""
        return self.columns[0] - self.lead

    @property
    def lead(self) -> int:
        """Number of stored inputs before the requested ones."""
        return self.form.lead(self.columns[0])

    @property
    def first_word(self) -> int:
        """Index of the first column of ``words`` in a row of the whole matrix, counted in words from input 0."""
        return self.first * self.form.bits // 32

    def word_memory(self) -> torch.Tensor:
        """Memory to read words into, (outputs, words), from ``first_word`` on: ``words`` itself if the codes begin at a word
        boundary. If not, call ``put_words`` after reading."""
        return self.words if not self._rest else self.words.new_empty(len(self.words), self.words.shape[1] + 1)

    def put_words(self, words: torch.Tensor) -> None:
        """Copy codes that were read into ``word_memory`` to this object's own ``words``."""
        if words is not self.words:
            size = 4 * self.words.shape[1]
            self.words.view(torch.uint8).copy_(words.view(torch.uint8)[:, self._rest : self._rest + size])

    @property
    def _rest(self) -> int:
        """Bytes of the word ``first_word`` that precede these codes. Only 8-bit codes without groups can begin inside a word."""
        return self.first * self.form.bits % 32 // 8

    def groups(self, size: int) -> Range:
        """Range of a checkpoint's groups that these codes overlap.

        Args:
            size: group size of the checkpoint, a multiple of the group size here; 0 for one group.
        """
        if not size:
            return 0, 1
        last = self.first + (self.scales.shape[1] - 1) * self.form.group
        return self.first // size, last // size + 1

    def put_groups(self, scales: torch.Tensor, zeros: torch.Tensor | None, size: int, begin: int) -> None:
        """Store a checkpoint's scales and zero points, (outputs, groups), of groups of ``size`` inputs, from its group ``begin`` on."""
        if size != self.form.group:  # one group of the checkpoint is several groups here
            index = torch.zeros(self.scales.shape[1], dtype=torch.int64)
            if size:
                index = (self.first + torch.arange(len(index)) * self.form.group) // size - begin
            scales, zeros = scales[:, index], None if zeros is None else zeros[:, index]
        self.scales.copy_(scales)
        if self.zeros is not None:
            self.zeros.copy_(zeros)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes of 4 or 8 bits along the last dimension, lowest bits first: (…, W) int32 or bytes → (…, W · 32 / bits) uint8."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    pairs = codes.to(torch.int16)  # the second code of a byte moves to the next byte
    return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)


def row_chunks(begin: int, end: int, columns: int) -> Iterator[Range]:
    """Ranges that divide rows ``begin`` to ``end`` of a matrix with ``columns`` columns into chunks of about ``CHUNK`` weights."""
    step = max(1, CHUNK // max(1, columns))
    return ((first, min(first + step, end)) for first in range(begin, end, step))
