"""Routing of tokens to experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labinfer.functions.routing_rule import RouterWeights, RoutingRule


def route(
    x_TD: torch.Tensor, router: RouterWeights, num_tokens_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights, (T, A)."""
    ids_TA, weights_TA = choose(F.linear(x_TD.float(), router.weight_ED.float()), router.bias_E, router.rule)
    return ids_TA, count_and_scale(ids_TA, weights_TA, router, num_tokens_E)


def count_and_scale(
    ids_TA: torch.Tensor, weights_TA: torch.Tensor, router: RouterWeights, num_tokens_E: torch.Tensor | None
) -> torch.Tensor:
    """Weights times the router's factor on each expert, (T, A); the chosen experts are counted in ``num_tokens_E``."""
    if num_tokens_E is not None:
        counts = torch.ones((), dtype=torch.int64, device=ids_TA.device).expand(ids_TA.numel())
        num_tokens_E.scatter_add_(0, ids_TA.flatten(), counts)
    return weights_TA if router.scale_E is None else weights_TA * router.scale_E[ids_TA]


def choose(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights, (T, A), from the router's logits."""
    if rule.scores == "chosen":
        chosen_TA, ids_TA = (logits_TE if bias_E is None else logits_TE + bias_E).topk(rule.num_chosen, dim=1)
        return ids_TA, chosen_TA.softmax(1)
    scores_TE = logits_TE.softmax(1) if rule.scores == "softmax" else logits_TE.sigmoid()
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.num_chosen_groups < rule.num_groups:
        ranked_TE = _within_best_groups(ranked_TE, rule)
    ids_TA = ranked_TE.topk(rule.num_chosen, dim=1).indices
    weights_TA = scores_TE.gather(1, ids_TA)
    if rule.normalized:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=rule.least_sum)
    return ids_TA, weights_TA * rule.scale if rule.scale != 1.0 else weights_TA


def _within_best_groups(ranked_TE: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Scores within the best groups (by the sum of each group's best scores); minus infinity elsewhere."""
    grouped_TGE = ranked_TE.view(len(ranked_TE), rule.num_groups, -1)
    sums_TG = grouped_TGE.topk(min(rule.num_group_best, grouped_TGE.shape[2]), dim=2).values.sum(2)
    best_TG = sums_TG.topk(rule.num_chosen_groups, dim=1).indices
    outside_TG = torch.ones(grouped_TGE.shape[:2], dtype=torch.bool, device=ranked_TE.device).scatter(1, best_TG, False)
    return grouped_TGE.masked_fill(outside_TG.unsqueeze(2), float("-inf")).flatten(1)
