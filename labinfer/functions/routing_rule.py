"""``RoutingRule`` (top-k selection of experts by router scores) and ``RouterWeights``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """Score function of the router, and the top-k choice of experts."""

    num_chosen: int
    """Experts per token (top-k)."""
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """``softmax`` over all experts (Shazeer et al. 2017, arXiv:1701.06538), ``sigmoid`` of each (DeepSeek-V3, arXiv:2412.19437), or
    ``chosen``: choice by logit plus bias, weights by a softmax over the chosen experts (gpt-oss, arXiv:2508.10925)."""
    normalized: bool = True
    """Whether a token's weights are divided by their sum."""
    least_sum: float = 1e-20
    """Lower bound of the divisor if ``normalized``."""
    scale: float = 1.0
    """Factor on the weights."""
    num_groups: int = 1
    """Groups of consecutive experts (group-limited routing). Experts are chosen from the ``num_chosen_groups`` groups with the highest
    score."""
    num_chosen_groups: int = 1
    num_group_best: int = 2
    """A group's score is the sum of this many of its highest expert scores: 2 in DeepSeek-V3, 1 in DeepSeek-V2 (arXiv:2405.04434)."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """A layer's router, argument of ``Route``."""

    weight_ED: torch.Tensor
    """Router weights of all experts of the layer, float32 or bfloat16; the arithmetic is in float32."""
    rule: RoutingRule
    bias_E: torch.Tensor | None = None
    """Bias on the scores that affects the choice, not the weights (Wang et al. 2024, arXiv:2408.15664); float32."""
    scale_E: torch.Tensor | None = None
    """Factor on each expert's weights, applied last; float32."""
