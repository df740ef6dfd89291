"""Normalisation, activation and position: one pass over the activations each."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_rms_norm(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden + delta`` and its ``rms_norm``; without a delta ``hidden`` as it is. ``hidden`` may be overwritten."""
    hidden_TD = hidden_TD if delta_TD is None else hidden_TD + delta_TD
    return hidden_TD, rms_norm(hidden_TD, weight_D, eps)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight``, with the mean square taken in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide_TD = x_TD.float()
    scale_T1 = torch.rsqrt(wide_TD.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight_D * (wide_TD * scale_T1).to(x_TD.dtype)


def silu_and_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of the two halves: (T, 2F) → (T, F) (Shazeer 2020, arXiv:2002.05202)."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def rotary(x_THP: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (p, p + P/2) of every head by the token's angles (Su et al. 2021, arXiv:2104.09864; half-split layout)."""
    low_THP, high_THP = x_THP.chunk(2, dim=-1)
    turned_THP = torch.cat((-high_THP, low_THP), dim=-1)
    return x_THP * cos_TP.unsqueeze(1) + turned_THP * sin_TP.unsqueeze(1)
