"""IndexBuffer: index tensors of a step (token ids, positions, slots, block tables) in one buffer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch

from labinfer.worker.host_copies import HostCopies

DTYPE = torch.int64
"""Dtype of all index tensors; see ``docs/decisions/0020-index-tensors.md``."""
LEAST_SIZE = 1 << 16
"""Initial capacity in index numbers: 128 sequences of 8,000 tokens in blocks of 16. A reallocation requires new captures of steps."""


class IndexBuffer:
    """Index tensors of one step at a time: lists are staged in one host array, which is copied to the device once.

    The tensors are views of a buffer that is reallocated only if it is too small. So a captured graph reads the next step's numbers
    at the addresses of the captured step's. The tensors are valid until the next ``fill``.

    Args:
        device: device on which the step runs.
        copies: copies to the device; plain ``HostCopies`` by default.
    """

    def __init__(self, device: torch.device, copies: HostCopies | None = None):
        self._copies = copies or HostCopies()
        self._numbers = torch.empty(0, dtype=DTYPE, device=device)
        self._sizes: list[int] = []
        self._filled, self._parts = self._numbers, ()
        """Views of the buffer: one of all parts, and one of each part, with the sizes ``_sizes``. The next step of equal sizes reuses the views."""

    @torch.inference_mode()
    def fill(self, **parts: Iterable[list[int]]) -> dict[str, torch.Tensor]:
        """Return a tensor for each named part: the concatenation of the part's lists."""
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
            self._copies.upload(torch.frombuffer(staged, dtype=DTYPE), self._filled)
        return dict(zip(parts, self._parts, strict=True))
