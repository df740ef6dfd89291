"""``RoutingRule``: how a mixture's router chooses experts by their scores; and ``RouterWeights``, what gives the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """Scores of all experts of a layer, and the choice among them."""

    num_chosen: int
    """Experts of each token."""
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """Softmax over all experts (Shazeer et al. 2017, arXiv:1701.06538), or a sigmoid of each (DeepSeek-V3, arXiv:2412.19437);
    or the logits themselves, to which the bias is added, with a softmax over those of the chosen experts as their weights
    (gpt-oss, arXiv:2508.10925)."""
    normalized: bool = True
    """Whether a token's weights are divided by their sum."""
    least_sum: float = 1e-20
    """Lower bound of that sum."""
    scale: float = 1.0
    """Factor on the weights."""
    num_groups: int = 1
    """Groups of neighbouring experts, of which only the ``num_chosen_groups`` with the best experts are chosen from."""
    num_chosen_groups: int = 1
    num_group_best: int = 2
    """Experts of a group whose scores together are the group's: its best two (DeepSeek-V3), or its best alone (DeepSeek-V2,
    arXiv:2405.04434)."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """A layer's router, as ``Route`` is given it."""

    weight_ED: torch.Tensor
    """Weight of all experts of the layer, float32 or bfloat16; the arithmetic is in float32."""
    rule: RoutingRule
    bias_E: torch.Tensor | None = None
    """Added to the scores for the choice only (Wang et al. 2024, arXiv:2408.15664); float32."""
    scale_E: torch.Tensor | None = None
    """Factor of each expert on its weights, the last that is applied to them; float32."""
