"""``DeltaHeads``: constant head arguments of the gated delta rule in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """A rank's value heads of one layer, argument of ``DeltaRule``."""

    rate_H: torch.Tensor
    """Decay rate of each head, float32."""
    bias_H: torch.Tensor
    """Bias of each head's decay, float32."""
    key_heads_H: torch.Tensor
    """Index of each value head's query and key head; int64, in host memory."""
