"""Gated delta rule (Yang et al. 2024, arXiv:2412.06464), a linear attention, with its causal convolution and gated norm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.reference.elementwise import rms_norm

CHUNK = 64
"""Tokens per chunk, for which one triangular system is solved."""
L2_EPS = 1e-6


def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    bias_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve each sequence's rows, preceded by the inputs in its state, and store its last inputs as the new state."""
    out_TC = x_TC.new_empty(x_TC.shape)
    weight_C1W = weight_WC.t().unsqueeze(1)
    for rows_BN, slots_B, before in by_length(state, batch):
        inputs_BSC = torch.cat((before, x_TC[rows_BN]), dim=1)
        mixed_BCN = F.conv1d(inputs_BSC.float().transpose(1, 2), weight_C1W, bias_C, groups=x_TC.shape[1])
        out_TC[rows_BN] = F.silu(mixed_BCN).transpose(1, 2).to(x_TC.dtype)
        state[slots_B] = inputs_BSC[:, rows_BN.shape[1] :]
    return out_TC


def delta_rule(
    qkv_TC: torch.Tensor, gates_TG: torch.Tensor, state: torch.Tensor, batch: AttentionBatch, heads: DeltaHeads
) -> torch.Tensor:
    """Apply ``recurrent`` to sequences with one new token, and ``chunked`` to others; sequences of equal length are batched."""
    _, num_heads, key_size, value_size = state.shape
    values = num_heads * value_size
    keys = (qkv_TC.shape[1] - values) // 2
    q_TKP, k_TKP, v_THP = (
        part.unflatten(1, (-1, size)).float()
        for part, size in zip(qkv_TC.split((keys, keys, values), dim=1), (key_size, key_size, value_size), strict=True)
    )
    q_THP, k_THP = (_select_heads(_l2_norm(x_TKP), heads.key_heads_H) for x_TKP in (q_TKP, k_TKP))
    q_THP = q_THP * key_size**-0.5
    b_TH, a_TH = gates_TG.float().chunk(2, dim=1)
    beta_TH, log_decay_TH = b_TH.sigmoid(), -heads.rate_H * F.softplus(a_TH + heads.bias_H)
    out_THP = qkv_TC.new_empty(v_THP.shape)
    for rows_BN, slots_B, before in by_length(state, batch):
        form = recurrent if rows_BN.shape[1] == 1 else chunked
        inputs = RuleInputs(*(x[rows_BN].transpose(1, 2) for x in (q_THP, k_THP, v_THP, beta_TH, log_decay_TH)))
        out_BHNP, state[slots_B] = form(inputs, before)
        out_THP[rows_BN] = out_BHNP.transpose(1, 2).to(qkv_TC.dtype)
    return out_THP


class RuleInputs(NamedTuple):
    """Inputs of the delta rule for B sequences with N tokens each."""

    q: torch.Tensor
    """Query vectors, (B, H, N, key size), L2-normalized; ``k`` (keys) has this shape, too."""
    k: torch.Tensor
    v: torch.Tensor
    """Value vectors, (B, H, N, P)."""
    beta: torch.Tensor
    """Step size of the state's correction, (B, H, N)."""
    log_decay: torch.Tensor
    """Logarithm of each token's decay of the state, (B, H, N)."""


def recurrent(inputs: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-by-token form of the delta rule: outputs (B, H, N, P), and the new state (B, H, key size, P)."""
    q, k, v, beta, log_decay = inputs
    out = torch.empty_like(v)
    for n in range(v.shape[2]):
        state = state * log_decay[:, :, n, None, None].exp()
        k_BH1P, q_BH1P = k[:, :, n, None], q[:, :, n, None]
        correction_BH1P = (v[:, :, n, None] - k_BH1P @ state) * beta[:, :, n, None, None]
        state = state + k_BH1P.transpose(2, 3) @ correction_BH1P
        out[:, :, n] = (q_BH1P @ state).squeeze(2)
    return out, state


def chunked(inputs: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked form of ``recurrent`` with matrix products: the corrections of a chunk's tokens solve a triangular system.

    Correction t is ``beta_t (v_t - decay_t k_t S - sum over j < t of decay_t / decay_j (k_t k_j) correction_j)``, where S is the
    state before the chunk, and decays are cumulative from there.
    """
    outs, chunks = [], [x.split(CHUNK, dim=2) for x in inputs]
    for q, k, v, beta, log_decay in zip(*chunks, strict=True):
        total = log_decay.cumsum(dim=2)
        later = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=q.device).triu(1)
        between = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
        decay, beta = total.exp().unsqueeze(3), beta.unsqueeze(3)
        system = beta * (k @ k.transpose(2, 3)) * between
        corrections = torch.linalg.solve_triangular(
            system, beta * (v - decay * (k @ state)), upper=False, unitriangular=True
        )
        outs.append(decay * (q @ state) + (q @ k.transpose(2, 3) * between) @ corrections)
        to_end = (total[:, :, -1:] - total).exp().unsqueeze(3)
        state = decay[:, :, -1:] * state + (k * to_end).transpose(2, 3) @ corrections
    return torch.cat(outs, dim=2), state


def gated_norm(x_THP: torch.Tensor, gate_THP: torch.Tensor, weight_P: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm(x) * silu(gate)``, the gate in float32."""
    return (rms_norm(x_THP, weight_P, eps) * F.silu(gate_THP.float())).to(x_THP.dtype)


def _l2_norm(x_TKP: torch.Tensor) -> torch.Tensor:
    return x_TKP * torch.rsqrt(x_TKP.square().sum(dim=-1, keepdim=True) + L2_EPS)


def _select_heads(x_TKP: torch.Tensor, key_heads_H: torch.Tensor) -> torch.Tensor:
    """Key head of each value head: (T, K, P) → (T, H, P). Uses ints, as indexing by the host tensor ``key_heads_H`` would copy it to the device."""
    return torch.stack([x_TKP[:, head] for head in key_heads_H.tolist()], dim=1)


def by_length(state: torch.Tensor, batch: AttentionBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batch the sequences by their number of new tokens: rows (B, N), state slots, and the states, with zeros for new sequences."""
    by_count: dict[int, list[int]] = {}
    for b, (begin, end) in enumerate(itertools.pairwise(batch.row_ptr)):
        by_count.setdefault(end - begin, []).append(b)
    for count, members in by_count.items():
        if len(by_count) == 1:
            rows_BN, part = batch.row_ptr_B[:-1].unsqueeze(1) + torch.arange(count, device=state.device), batch
        else:
            rows_R, part = batch.part(members)  # made once for all layers of a step
            rows_BN = rows_R.view(-1, count)
        slots_B, is_new_B = part.state_slots_B, part.context_lens_B == count
        before = state[slots_B].masked_fill(is_new_B.view(-1, *[1] * (state.dim() - 1)), 0)
        yield rows_BN, slots_B, before
