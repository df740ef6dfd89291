"""IndexBuffer: the numbers that say what a step runs on, as tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch

DTYPE = torch.int64
"""Dtype of all of them; see ``docs/decisions/0020-index-tensors.md``."""
LEAST_SIZE = 1 << 16
"""Numbers that there is room for: as many as 128 sequences of 8,000 tokens take in blocks of 16. Where they move, steps are captured again."""


class IndexBuffer:
    """Index tensors of one step at a time: lists are staged in one host array, which is copied once to where the step runs.

    The tensors are views of memory that stays where it is as long as it is large enough, so that a graph captured on an
    accelerator reads the next step's numbers in the same places. They hold until the next ``fill``.

    Args:
        device: where the step runs.
    """

    def __init__(self, device: torch.device):
        self._numbers = torch.empty(0, dtype=DTYPE, device=device)
        self._sizes: list[int] = []
        self._filled, self._parts = self._numbers, ()
        """Views of the numbers, for parts of these sizes: steps that only decode seldom need others than the one before."""

    @torch.inference_mode()
    def fill(self, **parts: Iterable[list[int]]) -> dict[str, torch.Tensor]:
        """Each part, given as lists that follow one another, as a tensor of that name."""
        staged, sizes = array("q"), []
        for lists in parts.values():
            begin = len(staged)
            for numbers in lists:
                staged.fromlist(numbers)
            sizes.append(len(staged) - begin)
        if len(staged) > len(self._numbers):
            self._numbers = torch.empty(max(LEAST_SIZE, 2 * len(staged)), dtype=DTYPE, device=self._numbers.device)
            self._sizes = []
        if sizes != self._sizes:
            self._sizes, self._filled = sizes, self._numbers[: len(staged)]
            self._parts = self._filled.split(sizes)
        if staged:
            self._filled.copy_(torch.frombuffer(staged, dtype=DTYPE))
        return dict(zip(parts, self._parts, strict=True))
