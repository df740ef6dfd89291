"""``ClampedGate``: the activation of experts whose projections have biases, and these biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """``g * sigmoid(alpha * g) * (u + 1)``, where g is the gate up to a limit, and u what the gate is for within it.

    Source: model card of gpt-oss, arXiv:2508.10925; ``GptOssExperts`` in Transformers.
    """

    alpha: float
    limit: float
    """Upper bound of g, and of |u|."""
    gate_EF: torch.Tensor
    """Bias of each expert's gate, float32; columns that are here, and zeros up to a multiple of 32."""
    up_EF: torch.Tensor
    """Likewise."""
    down_ED: torch.Tensor
    """Bias of each expert's output, float32, with zeros up to a multiple of 32."""

    def activate(self, gate_up_TF: torch.Tensor, expert: int | torch.Tensor) -> torch.Tensor:
        """Activations of one expert, or of each row's, from products without biases: (T, 2F) → (T, F) in their dtype."""
        gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=1)
        columns = gate_TF.shape[1]
        gate_TF = (gate_TF + self.gate_EF[expert, :columns]).clamp(max=self.limit)
        up_TF = (up_TF + self.up_EF[expert, :columns]).clamp(-self.limit, self.limit)
        return (gate_TF * (self.alpha * gate_TF).sigmoid() * (up_TF + 1)).to(gate_up_TF.dtype)
