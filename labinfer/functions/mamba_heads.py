"""``MambaHeads``: constant head arguments of the Mamba-2 scan in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaHeads:
    """A rank's heads of one layer, argument of ``SelectiveScan``."""

    rate_H: torch.Tensor
    """Decay rate of each head, float32: the exponential of the checkpoint's ``A_log``."""
    bias_H: torch.Tensor
    """Bias of each head's time step dt, float32."""
    skip_H: torch.Tensor
    """Factor D of each head's input in its output, float32."""
    groups_H: torch.Tensor
    """Index of the group whose B and C serve each head; int64, in host memory."""
    min_dt: float = 0.0
    """Smallest time step."""
    max_dt: float = float("inf")
    """Largest time step."""
