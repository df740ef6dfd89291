"""``HostCopies``: copies between host memory and the memory of a rank's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pools of blocks or states, each with the pool that its slices are copied to."""


class HostCopies:
    """Copies between host memory and the device. This base class is for the CPU, ``AcceleratorCopies`` for accelerators."""

    def upload(self, numbers: torch.Tensor, dest: torch.Tensor) -> None:
        """Copy ``numbers`` from host memory to ``dest``, on the device."""
        dest.copy_(numbers)

    def upload_all(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy tensors from host memory to the device."""
        return parts

    def download(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy device tensors (B, …) to host memory. The tensors are float32, or int64 with values of at most 32 bits."""
        return parts

    def move(self, pairs: Pairs, source: torch.Tensor, dest: torch.Tensor) -> None:
        """Copy slices ``source`` of each pair's first pool to slices ``dest`` of the second pool. Both index tensors are in host memory."""
        if len(dest) == 1:  # no temporary copy: a state is large
            for pool, given in pairs:
                given[dest[0]].copy_(pool[source[0]])
            return
        source, dest = source.to(pairs[0][0].device), dest.to(pairs[0][1].device)
        for pool, given in pairs:
            given[dest] = pool[source]
