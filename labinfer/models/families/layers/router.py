"""Router of a mixture of experts: the experts of each token, and their weights.

Every tensor-parallel rank computes an identical choice from identical inputs, so no ids are sent. All arithmetic is in float32 for any
model dtype: in a narrower dtype, different scores could round to equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from labinfer.functions.routing_rule import RouterWeights, RoutingRule
from labinfer.models.config_file import ConfigFile
from labinfer.models.layers.context import StageContext
from labinfer.weights.slices import MatrixSlice, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class RouterConfig(RoutingRule):
    """Unsharded router of a layer."""

    num_experts: int
    bias_dims: int = 0
    """Number of dimensions of the checkpoint's bias (the last one is over experts); 0 without a bias. The bias affects the choice only, not the
    weights (Wang et al. 2024, arXiv:2408.15664)."""
    expert_scale: bool = False
    """Whether each expert has a learned factor on its weights."""


def read_router(file: ConfigFile, num_experts: int, num_chosen: int, **fields: Any) -> RouterConfig:
    """Config of a router that chooses ``num_chosen`` of ``num_experts`` experts per token.

    Args:
        fields: fields of ``RouterConfig`` that differ from their defaults.

    Raises:
        UserError: there are fewer than ``num_chosen`` experts to choose from, or the groups are unequal.
    """
    router = RouterConfig(num_experts=num_experts, num_chosen=num_chosen, **fields)
    groups, chosen_groups = router.num_groups, router.num_chosen_groups
    file.require(
        num_experts % groups == 0 and chosen_groups <= groups,
        f"{num_experts} experts cannot be chosen from {chosen_groups} of {groups} equal groups",
    )
    file.require(
        num_chosen <= num_experts // groups * chosen_groups,
        f"{num_chosen} experts are to be chosen for each token, of {num_experts // groups * chosen_groups}",
    )
    return router


class Router(WeightedModule):
    """Scores and top-k choice, replicated on every rank; the first rank counts the tokens of each expert in ``num_tokens_E``."""

    def __init__(self, config: RouterConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self.config, self._route = config, ctx.functions.route
        self.weight = empty_parameter(config.num_experts, hidden_size, dtype=torch.float32)
        self.bias = empty_parameter(config.num_experts, dtype=torch.float32) if config.bias_dims else None
        self.scale = empty_parameter(config.num_experts, dtype=torch.float32) if config.expert_scale else None
        self._counts = ctx.tp.rank == 0
        self.register_buffer("num_tokens_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, D) → expert ids of each token, (T, A) int64, and their weights, (T, A) float32."""
        counts_E = self.num_tokens_E if self._counts else None
        return self._route(x_TD, self._weights, counts_E)

    @cached_property
    def _weights(self) -> RouterWeights:
        """Argument of the function ``route``. Built at the first step and not earlier, because loading and packing replace
        the tensors."""
        return RouterWeights(self.weight, self.config, self.bias, self.scale)

    def pack(self) -> None:
        self.num_tokens_E.zero_()
        if self.weight.is_meta:
            return
        narrow_ED = self.weight.bfloat16()
        if torch.equal(narrow_ED.float(), self.weight):  # exact in bfloat16: half the bytes to read in every step
            self.weight = nn.Parameter(narrow_ED, requires_grad=False)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        experts, hidden_size = self.weight.shape
        yield MatrixSlice(
            name=prefix,
            outputs=experts,
            inputs=hidden_size,
            rows=(0, experts),
            columns=(0, hidden_size),
            destination=self.weight,
        )
        if self.bias is not None:
            shape = (1,) * (self.config.bias_dims - 1) + (experts,)
            yield TensorSlice(name=f"{prefix}.e_score_correction_bias", shape=shape, destination=self.bias.view(shape))
        if self.scale is not None:
            yield TensorSlice(name=f"{prefix}.expert_scale", shape=(experts,), destination=self.scale)
