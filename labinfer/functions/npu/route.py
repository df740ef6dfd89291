"""Routing of tokens to experts by ``npu_moe_gating_top_k``."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from labinfer.functions.reference import route as reference
from labinfer.functions.routing_rule import RouterWeights, RoutingRule

MAX_EXPERTS = 2048
GROUP_ALIGNMENT = 32
"""``npu_moe_gating_top_k`` pads the experts of each group to a multiple of this number; at most ``MAX_EXPERTS`` in all groups together."""
SOFTMAX, SIGMOID = 0, 1
"""Values of the argument ``norm_type`` of ``npu_moe_gating_top_k``."""


def route(
    ops: ModuleType, x_TD: torch.Tensor, router: RouterWeights, num_tokens_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights; see ``Route``."""
    rule = router.rule
    if not len(x_TD) or not _can_route(rule, router.weight_ED.shape[0]):
        return reference.route(x_TD, router, num_tokens_E)
    is_softmax = rule.scores == "softmax"
    weights_TA, ids_TA, _ = ops.npu_moe_gating_top_k(
        F.linear(x_TD.float(), router.weight_ED.float()),
        rule.num_chosen,
        bias=router.bias_E,
        k_group=rule.num_chosen_groups if _is_grouped(rule) else 1,
        group_count=rule.num_groups if _is_grouped(rule) else 1,
        group_select_mode=int(rule.num_group_best == 2),
        norm_type=SOFTMAX if is_softmax else SIGMOID,
        routed_scaling_factor=1.0 if is_softmax else rule.scale,
        eps=rule.least_sum,
    )
    if is_softmax:  # the operator divides only sigmoid scores by their sum
        if rule.normalized:
            weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=rule.least_sum)
        weights_TA = weights_TA * rule.scale if rule.scale != 1.0 else weights_TA
    ids_TA = ids_TA.long()
    return ids_TA, reference.count_and_scale(ids_TA, weights_TA, router, num_tokens_E)


def _is_grouped(rule: RoutingRule) -> bool:
    return rule.num_chosen_groups < rule.num_groups


def _can_route(rule: RoutingRule, num_experts: int) -> bool:
    """Whether ``npu_moe_gating_top_k`` supports ``rule`` for ``num_experts`` experts."""
    if rule.scores == "chosen" or rule.scores == "sigmoid" and not rule.normalized:
        return False
    groups, chosen = (rule.num_groups, rule.num_chosen_groups) if _is_grouped(rule) else (1, 1)
    each = num_experts // groups
    padded = -(-each // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    return (
        num_experts % groups == 0
        and each > 2
        and padded * groups <= MAX_EXPERTS
        and rule.num_chosen <= each * chosen
        and (groups == 1 or rule.num_group_best in (1, 2))
    )
