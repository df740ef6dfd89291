"""Normalization, activation and rotary embedding: one pass over the activations each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function


def add_rms_norm(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden + delta`` and its ``rms_norm``; ``hidden`` itself if ``delta_TD`` is None. ``hidden_TD`` may be overwritten."""
    hidden_TD = hidden_TD if delta_TD is None else hidden_TD + delta_TD
    return hidden_TD, rms_norm(hidden_TD, weight_D, eps)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight``, with the mean square in float32 (Zhang & Sennrich 2019, arXiv:1910.07467).

    A float32 weight is multiplied before rounding to the dtype of ``x_TD``.
    """
    wide_TD = x_TD.float()
    scale_T1 = torch.rsqrt(wide_TD.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (weight_D * (wide_TD * scale_T1).to(weight_D.dtype)).to(x_TD.dtype)


def silu_and_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; gate and up are the halves of a row: (T, 2F) → (T, F) (Shazeer 2020, arXiv:2002.05202)."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def gelu_and_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``, gate and up are the halves of a row, with the tanh approximation of GELU: (T, 2F) → (T, F) (Shazeer 2020, arXiv:2002.05202)."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh") * up_TF


def sigmoid(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``1 / (1 + exp(-x))`` whose bits depend on nothing but x: ``torch.sigmoid`` rounds the last elements of a tensor or thread differently."""
    out = x.new_empty(x.shape) if out is None else out
    if has_torch_function((x,)):  # a capture records this as one torch operation
        return handle_torch_function(sigmoid, (x,), x, out)
    return out.copy_(x.float().neg().exp_().add_(1).reciprocal_())


sigmoid.repeats_in_place = True


def rotary(x_THP: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first R dimensions of every head by the token's angles (Su et al. 2021, arXiv:2104.09864).

    Pairs are (r, r + R/2), or (2r, 2r + 1) if ``interleaved``. The other dimensions are unchanged.
    """
    rotated_THR, rest = x_THP[..., : cos_TR.shape[-1]], x_THP[..., cos_TR.shape[-1] :]
    if interleaved:
        even_THF, odd_THF = rotated_THR[..., 0::2], rotated_THR[..., 1::2]
        turned_THR = torch.stack((-odd_THF, even_THF), dim=-1).flatten(-2)
    else:
        low_THF, high_THF = rotated_THR.chunk(2, dim=-1)
        turned_THR = torch.cat((-high_THF, low_THF), dim=-1)
    out_THR = rotated_THR * cos_TR.unsqueeze(1) + turned_THR * sin_TR.unsqueeze(1)
    return torch.cat((out_THR, rest), dim=-1) if rest.shape[-1] else out_THR
