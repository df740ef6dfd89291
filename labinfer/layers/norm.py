"""Normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.layers.context import StageContext
from labinfer.weights.source import TensorSource, WeightedModule, empty_parameter, whole


class RMSNorm(WeightedModule):
    """Root-mean-square normalisation over the hidden dimension; every rank holds all of it."""

    def __init__(self, hidden_size: int, eps: float, ctx: StageContext):
        super().__init__()
        self._eps, self._add_rms_norm = eps, ctx.functions.add_rms_norm
        self.weight = empty_parameter(hidden_size, dtype=ctx.dtype)

    def forward(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what the last part of the layer gave, and normalise: (hidden + delta, its norm). May overwrite ``hidden``."""
        return self._add_rms_norm(hidden_TD, delta_TD, self.weight, self._eps)

    def sources(self, prefix: str) -> Iterator[TensorSource]:
        yield whole(f"{prefix}.weight", self.weight)
