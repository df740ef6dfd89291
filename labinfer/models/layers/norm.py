"""RMS norms, whose weight is replicated on the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labinfer.functions.calls import AddRMSNormCall, FunctionCall
from labinfer.models.layers.context import StageContext
from labinfer.weights.slices import TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


class NormWeight(WeightedModule):
    """A norm's weight, replicated on every rank.

    Args:
        offset: added to the checkpoint's weight; the sum is kept in float32, as it needs more precision.
    """

    def __init__(self, size: int, ctx: StageContext, offset: float = 0.0):
        super().__init__()
        self._offset = offset
        self.weight = empty_parameter(size, dtype=torch.float32 if offset else ctx.dtype)

    def pack(self) -> None:
        if self._offset:
            self.weight += self._offset

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield TensorSlice(name=f"{prefix}.weight", shape=tuple(self.weight.shape), destination=self.weight)


class RMSNorm(NormWeight):
    """RMS norm over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, ctx: StageContext, offset: float = 0.0):
        super().__init__(size, ctx, offset)
        self._eps, self._add_rms_norm = eps, ctx.functions.add_rms_norm

    def calls(self) -> Iterator[FunctionCall]:
        yield AddRMSNormCall(self.weight.shape[0])

    def forward(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a sublayer's output and normalize: (hidden + delta, its norm). May overwrite ``hidden_TD`` unless ``delta_TD`` is None."""
        return self._add_rms_norm(hidden_TD, delta_TD, self.weight, self._eps)
