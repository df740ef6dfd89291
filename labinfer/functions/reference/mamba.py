"""Scan and gated norm of the Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060); its convolution is ``delta_rule.causal_conv``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.reference.delta_rule import by_length

CHUNK = 64
"""Tokens per chunk, whose outputs are computed with matrix products."""


def selective_scan(
    xbc_TC: torch.Tensor, dt_TH: torch.Tensor, state: torch.Tensor, batch: AttentionBatch, heads: MambaHeads
) -> torch.Tensor:
    """Apply ``recurrent`` to sequences with one new token, and ``chunked`` to others; sequences of equal length are batched."""
    _, num_heads, state_size, head_size = state.shape
    values = num_heads * head_size
    others = (xbc_TC.shape[1] - values) // 2
    x_TI, b_TI, c_TI = xbc_TC.float().split((values, others, others), dim=1)
    x_THP = x_TI.unflatten(1, (num_heads, head_size))
    groups = heads.groups_H.tolist()  # in host memory
    b_THN, c_THN = (torch.stack([y.unflatten(1, (-1, state_size))[:, g] for g in groups], dim=1) for y in (b_TI, c_TI))
    dt_TH = F.softplus(dt_TH.float() + heads.bias_H).clamp(heads.min_dt, heads.max_dt)
    inputs = (dt_TH.unsqueeze(2) * x_THP, b_THN, c_THN, -heads.rate_H * dt_TH)
    read_THP = torch.empty_like(x_THP)
    for rows_BN, slots_B, before in by_length(state, batch):
        form = recurrent if rows_BN.shape[1] == 1 else chunked
        out_BHNP, state[slots_B] = form(ScanInputs(*(y[rows_BN].transpose(1, 2) for y in inputs)), before)
        read_THP[rows_BN] = out_BHNP.transpose(1, 2)
    return (read_THP + heads.skip_H.unsqueeze(1) * x_THP).to(xbc_TC.dtype)


class ScanInputs(NamedTuple):
    """Inputs of the scan for a batch of sequences with equally many tokens, (sequences, H, tokens, …)."""

    x: torch.Tensor
    """Inputs of each head times dt, P values per token."""
    b: torch.Tensor
    """B of each head's group; C (``c``) has this shape, too."""
    c: torch.Tensor
    log_decay: torch.Tensor
    """Logarithm of each token's decay of the state, one value per token."""


def recurrent(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-by-token form of the scan: reads of the state, shaped as ``inputs.x``, and the new state."""
    x, b, c, log_decay = inputs
    out = torch.empty_like(x)
    for n in range(x.shape[2]):
        state = state * log_decay[:, :, n, None, None].exp() + b[:, :, n, :, None] * x[:, :, n, None]
        out[:, :, n] = (c[:, :, n, None] @ state).squeeze(2)
    return out, state


def chunked(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked form of ``recurrent`` with matrix products: in a chunk, token t reads ``decay_t C_t S`` from the state S before the
    chunk, and ``decay_t / decay_j (C_t B_j) x_j`` of each token j up to t, where decays are cumulative from the chunk's begin."""
    outs, chunks = [], [y.split(CHUNK, dim=2) for y in inputs]
    for x, b, c, log_decay in zip(*chunks, strict=True):
        all_pairs = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device)
        later, same_or_later = all_pairs.triu(1), all_pairs.triu()
        # each sum of logarithms by itself: a difference of two cumulative sums would lose digits
        sums = log_decay.unsqueeze(3).masked_fill(same_or_later, 0).cumsum(dim=2)
        between, decay = sums.masked_fill(later, -torch.inf).exp(), log_decay.cumsum(dim=2).exp().unsqueeze(3)
        outs.append(decay * (c @ state) + (c @ b.transpose(2, 3) * between) @ x)
        state = decay[:, :, -1:] * state + (b * between[:, :, -1].unsqueeze(3)).transpose(2, 3) @ x
    return torch.cat(outs, dim=2), state


def gated_group_norm(
    x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """``x * silu(gate)`` over the RMS of each group, times the weight, in float32."""
    gated_TGN = (x_TD.float() * F.silu(gate_TD.float())).unflatten(1, (num_groups, -1))
    scale_TG1 = torch.rsqrt(gated_TGN.square().mean(dim=2, keepdim=True) + eps)
    return ((gated_TGN * scale_TG1).flatten(1) * weight_D.float()).to(x_TD.dtype)
