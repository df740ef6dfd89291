"""``DeltaHeads``: what the gated delta rule needs to know of a layer's heads, the same in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """This rank's value heads of a layer, as ``DeltaRule`` is given them."""

    rate_H: torch.Tensor
    """Rate at which each head forgets, float32."""
    bias_H: torch.Tensor
    """Bias of each head's rate, float32."""
    key_heads_H: torch.Tensor
    """Index of the query and key head of each value head; int64, in host memory."""
