"""``ClampedGate``: clamped gated activation of experts with biases (gpt-oss)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """``g * sigmoid(alpha * g) * (u + offset)``, where g is the gate clamped to at most ``gate_limit``, and u the up projection clamped
    to ±``limit``.

    Source: model card of gpt-oss, arXiv:2508.10925; ``GptOssExperts`` in Transformers.
    """

    alpha: float
    limit: float
    """Clamping limit of the up projection u, an upper bound of its magnitude."""
    gate_limit: float
    """Clamping limit of the gate projection g, an upper bound."""
    offset: float = 1.0
    gate_EF: torch.Tensor
    """Gate bias of each expert, float32: this rank's columns, zero-padded to a multiple of 32."""
    up_EF: torch.Tensor
    """Bias of each expert's up projection, float32: this rank's columns, zero-padded to a multiple of 32."""
    down_ED: torch.Tensor
    """Bias of each expert's down projection, float32, zero-padded to a multiple of 32."""

    def activate(self, gate_up_TF: torch.Tensor, expert: int | torch.Tensor) -> torch.Tensor:
        """Activations from products without biases, (T, 2F) → (T, F) in their dtype, for one expert or an expert per row."""
        gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=1)
        columns = gate_TF.shape[1]
        gate_TF = (gate_TF + self.gate_EF[expert, :columns]).clamp(max=self.gate_limit)
        up_TF = (up_TF + self.up_EF[expert, :columns]).clamp(-self.limit, self.limit)
        return (gate_TF * (self.alpha * gate_TF).sigmoid() * (up_TF + self.offset)).to(gate_up_TF.dtype)
