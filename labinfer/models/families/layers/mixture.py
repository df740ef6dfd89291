"""Mixture of experts in place of an MLP (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from labinfer.functions.calls import FunctionCall
from labinfer.functions.reference.elementwise import sigmoid
from labinfer.models.families.layers.expert_biases import ClampedGateConfig
from labinfer.models.families.layers.experts import make_routed_experts
from labinfer.models.families.layers.router import Router, RouterConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.linear import ReplicatedLinear
from labinfer.models.layers.mlp import GatedMLP, GatedMLPConfig


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Unsharded experts of a layer; each is a gated MLP."""

    router: RouterConfig
    intermediate_size: int
    """Columns of each expert."""
    shared: GatedMLPConfig | None = None
    """Shared expert: an MLP for every token besides its routed experts (Dai et al. 2024, arXiv:2401.06066)."""
    shared_gate: bool = False
    """Whether the shared expert is weighted by a sigmoid gate."""

    gate: ClampedGateConfig | None = None
    """Clamped activation of the routed experts; None for SiLU."""
    stacked_apart: bool = False
    """Whether checkpoints store all gate and all up projections in two tensors, not in one."""
    may_be_input_major: bool = False
    """See ``MatrixStack``."""
    has_experts: ClassVar[bool] = True
    reads_hidden: ClassVar[bool] = False
    num_sums: ClassVar[int] = 1

    def build(self, hidden_size: int, ctx: StageContext) -> Mixture:
        return Mixture(self, hidden_size, ctx)


class Mixture(nn.Module):
    """This rank's part of the routed and the shared experts; one all-reduce for both."""

    def __init__(self, config: MixtureConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self._sum_partials = ctx.sum_partials
        self.gate = Router(config.router, hidden_size, ctx)
        self.experts = make_routed_experts(
            *(config.router.num_experts, config.intermediate_size, hidden_size, ctx, config.gate),
            stacked_apart=config.stacked_apart,
            may_be_input_major=config.may_be_input_major,
        )
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if config.shared is not None:
            self.shared_expert = config.shared.build(hidden_size, ctx)
            if config.shared_gate:
                self.shared_expert_gate = ReplicatedLinear(hidden_size, 1, ctx)

    def calls(self) -> Iterator[FunctionCall]:
        """Call of the function ``experts``, for autotuning; none if this rank holds no experts."""
        return self.experts.experts_calls(self.gate.config.num_chosen)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Mixture-of-experts output of the hidden states ``x_TD``, (T, D)."""
        out_TD = self.experts(x_TD, *self.gate(x_TD))
        if self.shared_expert is not None:
            shared_TD = self.shared_expert.partial(x_TD)
            if self.shared_expert_gate is not None:
                shared_TD = shared_TD * sigmoid(self.shared_expert_gate(x_TD))
            out_TD = out_TD + shared_TD
        return self._sum_partials(out_TD)
