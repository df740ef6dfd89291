"""A dense MLP and routed experts in parallel, each with its own norms (Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from labinfer.functions.calls import FunctionCall
from labinfer.models.families.layers.experts import make_routed_experts
from labinfer.models.families.layers.router import Router, RouterConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.layers.norm import RMSNorm
from labinfer.weights.weighted_module import empty_parameter


@dataclass(frozen=True, kw_only=True)
class ParallelDenseMoEConfig:
    """``norm_1(dense(x)) + norm_2(experts(norm_3(hidden)))``; the router has its own norm of ``hidden``."""

    dense: GatedMLPConfig
    router: RouterConfig
    intermediate_size: int
    """Columns of each expert; the experts use the activation of ``dense``."""
    norm_eps: float
    has_experts: ClassVar[bool] = True
    reads_hidden: ClassVar[bool] = True
    num_sums: ClassVar[int] = 2

    def build(self, hidden_size: int, ctx: StageContext) -> ParallelDenseMoE:
        return ParallelDenseMoE(self, hidden_size, ctx)


class ParallelDenseMoE(nn.Module):
    """This rank's part of the MLP and of the experts."""

    def __init__(self, config: ParallelDenseMoEConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self._sum_partials = ctx.sum_partials
        self.dense = config.dense.build(hidden_size, ctx)
        self.dense_output_norm, self.experts_input_norm, self.experts_output_norm = (
            RMSNorm(hidden_size, config.norm_eps, ctx) for _ in range(3)
        )
        self.gate_norm = RouterNorm(hidden_size, config.norm_eps, ctx)
        self.gate = Router(config.router, hidden_size, ctx)
        gelu = config.dense.activation == "gelu"
        self.experts = make_routed_experts(
            config.router.num_experts, config.intermediate_size, hidden_size, ctx, gelu=gelu
        )

    def calls(self) -> Iterator[FunctionCall]:
        """Call of the function ``experts``, for autotuning; none if this rank holds no experts."""
        return self.experts.experts_calls(self.gate.config.num_chosen)

    def forward(self, x_TD: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Sum of the dense MLP's and the experts' normalized outputs, (T, D).

        Args:
            x_TD: input of the MLP, normalized.
            hidden_TD: input of the experts and of the router, before their norms.
        """
        _, dense_TD = self.dense_output_norm(self.dense(x_TD))
        _, routed_TD = self.gate_norm(hidden_TD)
        _, experts_TD = self.experts_input_norm(hidden_TD)
        _, experts_TD = self.experts_output_norm(self._sum_partials(self.experts(experts_TD, *self.gate(routed_TD))))
        return dense_TD + experts_TD


class RouterNorm(RMSNorm):
    """RMS norm with its weight divided by the square root of the hidden size; the weight is in float32, as routing depends on it."""

    def __init__(self, size: int, eps: float, ctx: StageContext):
        super().__init__(size, eps, ctx)
        self.weight = empty_parameter(size, dtype=torch.float32)

    def pack(self) -> None:
        self.weight *= self.weight.shape[0] ** -0.5
