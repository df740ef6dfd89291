"""How a matrix of weights may be held: as it is, or rounded to a few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix (outputs, inputs) in whole numbers; the order of ``data`` and ``scales`` is its implementation's."""

    data: torch.Tensor
    scales: torch.Tensor
    """One for each output, or for each group of inputs of each output; empty where they are among the data."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    """Of the matrix it was made of, and of rows that are looked up in it."""
    group: int = 0
    """Inputs that share a scale; 0 for all."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes


PackedWeight = torch.Tensor | QuantizedWeight
"""What ``pack_weight`` makes of a loaded matrix, and ``linear`` and ``embedding`` take."""
