"""Gated MLPs of stacked experts by ``npu_grouped_matmul``: one call multiplies the rows of all experts, without a wait for their counts.

Limits are those of the operators' pages in docs/zh/custom_APIs/torch_npu of Ascend/op-plugin.
"""

from __future__ import annotations

from types import ModuleType

import torch

from labinfer.functions.npu.elementwise import HALF_DTYPES, NpuElementwise
from labinfer.functions.npu.products import Int4Weight
from labinfer.functions.packed_experts import ExpertMLPs
from labinfer.functions.packed_weight import DenseWeight, PackedWeight
from labinfer.functions.reference import experts as reference
from labinfer.functions.reference.elementwise import gelu_and_mul
from labinfer.functions.stacked_experts import StackedExperts

MAX_EXPERTS = 1024
"""Maximum number of groups (experts) in a call of ``npu_grouped_matmul``."""
MAX_SIZE = 65535
"""Maximum size of the last dimension of rows and weights in a call of ``npu_grouped_matmul``."""
SIZES = 1
"""Value of the arguments ``group_list_type`` and ``expert_tokens_num_type``: the groups' sizes, not the cumulative sums."""


def experts(
    ops: ModuleType, x_TD: torch.Tensor, expert_ids_TA: torch.Tensor, weights_TA: torch.Tensor, mlps: ExpertMLPs
) -> torch.Tensor:
    """Weighted sum of the gated MLPs of each token's experts; see ``Experts``."""
    packed: StackedExperts = mlps.packed
    gate_up, down, count = packed.gate_up.weight, packed.down.weight, packed.num_experts
    is_grouped = gate_up is not None and 1 < count <= MAX_EXPERTS and x_TD.numel() and expert_ids_TA.numel()
    if mlps.gate is not None or not is_grouped or not (_can_group(gate_up, x_TD) and _can_group(down, x_TD)):
        return reference.experts(x_TD, expert_ids_TA, weights_TA, mlps)
    # Summed in expert order, so that results do not depend on the order of the router's choice.
    expert_ids_TA, order_TA = expert_ids_TA.sort(dim=1)
    weights_TA = weights_TA.gather(1, order_TA)
    local_TA = expert_ids_TA - mlps.first
    is_here_TA = (local_TA >= 0) & (local_TA < count)
    rows_PD, place_P, sizes_E, _ = ops.npu_moe_init_routing_v2(
        x_TD.contiguous(),
        torch.where(is_here_TA, local_TA, count).to(torch.int32),
        expert_num=count + 1,
        expert_tokens_num_type=SIZES,
        expert_tokens_num_flag=True,
        active_expert_range=[0, count + 1],
    )
    # The groups must have all rows, so the last expert gets those of other ranks' experts, too. They are not summed.
    sizes_E = torch.cat((sizes_E[: count - 1], sizes_E[count - 1 :].sum(0, keepdim=True)))
    middle_PF = _multiply(ops, rows_PD, gate_up, sizes_E)
    middle_PF = gelu_and_mul(middle_PF) if mlps.gelu else NpuElementwise(ops).silu_and_mul(middle_PF)
    parts_PD = _multiply(ops, middle_PF.contiguous(), down, sizes_E)[place_P.long()]
    parts_TAD = parts_PD.view(*expert_ids_TA.shape, -1).float() * weights_TA.unsqueeze(2)
    return parts_TAD.masked_fill(~is_here_TA.unsqueeze(2), 0).sum(1).to(x_TD.dtype)


def _can_group(weight: PackedWeight, x_TD: torch.Tensor) -> bool:
    """Whether ``npu_grouped_matmul`` multiplies rows in the dtype of ``x_TD`` by the stacked matrices ``weight``: sizes, dtype, quantization."""
    if max(weight.inputs, weight.outputs) > MAX_SIZE or not weight.inputs or not weight.outputs:
        return False
    if isinstance(weight, DenseWeight):
        return weight.dtype == x_TD.dtype
    if x_TD.dtype not in HALF_DTYPES:
        return False
    if isinstance(weight, Int4Weight):
        return weight.dtype == x_TD.dtype and weight.inputs % weight.group == 0
    return weight.bits == 8 and not weight.group


def _multiply(ops: ModuleType, rows_PI: torch.Tensor, weight: PackedWeight, sizes_E: torch.Tensor) -> torch.Tensor:
    """Product of each group of rows with its expert's matrix: (P, I) → (P, O)."""
    quantization: dict[str, list[torch.Tensor]] = {}
    if isinstance(weight, Int4Weight):
        scales, offsets = weight.scales, weight.offsets
        if weight.scales.shape[1] == 1:  # a single group, which the operator takes as a scale per output
            scales, offsets = scales.squeeze(1), offsets.squeeze(1)
        quantization = {"antiquant_scale": [scales], "antiquant_offset": [offsets]}
    elif not isinstance(weight, DenseWeight):
        scales_EO = weight.scales.to(rows_PI.dtype)
        quantization = {"antiquant_scale": [scales_EO], "antiquant_offset": [torch.zeros_like(scales_EO)]}
    return ops.npu_grouped_matmul(
        [rows_PI],
        [weight.data.transpose(1, 2)],
        group_list=sizes_E,
        split_item=2,
        group_type=0,
        group_list_type=SIZES,
        **quantization,
    )[0]
