"""Gated MLPs of stacked experts in Triton."""

from __future__ import annotations

import torch

from labinfer.functions.cuda.elementwise import gelu_and_mul, silu_and_mul
from labinfer.functions.cuda.products import CudaProducts, ExpertRows, can_multiply
from labinfer.functions.packed_experts import ExpertMLPs
from labinfer.functions.reference import experts as reference
from labinfer.functions.stacked_experts import StackedExperts

MAX_PAIRS = 512
"""Maximum number of (token, expert) pairs that run as single rows, each reading its expert's weights; more pairs are sorted by expert."""
ROWS = 64
"""Rows of an expert per program when pairs are sorted by expert."""


def experts(
    products: CudaProducts,
    x_TD: torch.Tensor,
    expert_ids_TA: torch.Tensor,
    weights_TA: torch.Tensor,
    mlps: ExpertMLPs,
) -> torch.Tensor:
    """Weighted sum of the gated MLPs of each token's experts; see ``Experts``."""
    packed: StackedExperts = mlps.packed
    gate_up, down, gate = packed.gate_up.weight, packed.down.weight, mlps.gate
    if gate_up is None or not can_multiply(gate_up) or not can_multiply(down):
        return reference.experts(x_TD, expert_ids_TA, weights_TA, mlps)
    expert_ids_TA, order_TA = expert_ids_TA.sort(
        dim=1
    )  # summed in expert order, so that results do not depend on the batch
    weights_TA = weights_TA.gather(1, order_TA)
    local_TA = expert_ids_TA - mlps.first
    is_here_TA = (local_TA >= 0) & (local_TA < packed.num_experts)
    num_tokens, each = local_TA.shape
    local_P = torch.where(is_here_TA, local_TA, -1).flatten()
    rows = sort_pairs(local_P, packed.num_experts) if len(local_P) > MAX_PAIRS else make_single_rows(local_P)
    middle_PF = products.multiply(
        x_TD.contiguous(), gate_up, rows=rows, pairs_each=each, global_scales_E=packed.gate_up.global_scales_E
    )
    clamped_P = local_P.clamp(min=0)
    if gate is not None:
        middle_PF = gate.activate(middle_PF, clamped_P)
    else:
        middle_PF = (gelu_and_mul if mlps.gelu else silu_and_mul)(middle_PF)
    parts_PD = products.multiply(middle_PF, down, rows=rows, global_scales_E=packed.down.global_scales_E).float()
    if gate is not None:
        parts_PD += gate.down_ED[clamped_P, : parts_PD.shape[1]]
    parts_TAD = parts_PD.view(num_tokens, each, down.outputs).mul_(weights_TA.unsqueeze(2))
    return parts_TAD.masked_fill_(~is_here_TA.unsqueeze(2), 0).sum(1).to(x_TD.dtype)


def make_single_rows(local_P: torch.Tensor) -> ExpertRows:
    """``ExpertRows`` whose groups have a single (token, expert) pair each."""
    order_P = torch.arange(len(local_P), device=local_P.device)
    return ExpertRows(expert_G=local_P, begin_G=order_P, end_G=order_P + 1, order_P=order_P, rows_each=16)


def sort_pairs(local_P: torch.Tensor, num_experts: int) -> ExpertRows:
    """Groups of up to ``ROWS`` pairs of the same expert, sorted by expert. To avoid a synchronization with the GPU, the number of groups is
    its upper bound; surplus groups are empty.

    Args:
        local_P: local expert of each pair, -1 for none.
    """
    keys_P = torch.where(local_P < 0, num_experts, local_P)
    sorted_P, order_P = keys_P.sort(stable=True)
    borders_E = torch.searchsorted(sorted_P, torch.arange(num_experts + 1, device=keys_P.device))
    begins_E, ends_E = borders_E[:-1], borders_E[1:]
    groups_E = (ends_E - begins_E + ROWS - 1) // ROWS
    last_E = groups_E.cumsum(0)
    most = min(len(local_P), len(local_P) // ROWS + num_experts)
    group_G = torch.arange(most, device=keys_P.device)
    expert_G = torch.searchsorted(last_E, group_G, right=True)
    clamped_G = expert_G.clamp(max=num_experts - 1)
    begin_G = begins_E[clamped_G] + (group_G - (last_E - groups_E)[clamped_G]) * ROWS
    return ExpertRows(
        expert_G=torch.where(expert_G < num_experts, expert_G, -1),
        begin_G=begin_G,
        end_G=torch.minimum(begin_G + ROWS, ends_E[clamped_G]),
        order_P=order_P,
        rows_each=ROWS,
    )
