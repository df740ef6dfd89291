"""``GatedMLP``: the gated MLP of Llama and most other families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from labinfer.functions.calls import FunctionCall, GatedActivationCall
from labinfer.functions.protocols import GeluAndMul, SiluAndMul
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.linear import Activation, MergedColumnParallelLinear, row_parallel
from labinfer.models.layers.sharding import shard_columns


@dataclass(frozen=True, kw_only=True)
class GatedMLPConfig:
    """Unsharded gated MLP, ``down(activation(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    has_experts: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False
    num_sums: ClassVar[int] = 1

    def build(self, hidden_size: int, ctx: StageContext) -> GatedMLP:
        return GatedMLP(self, hidden_size, ctx)


class GatedMLP(nn.Module):
    """This rank's columns of a gated MLP."""

    def __init__(self, config: GatedMLPConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        full = config.intermediate_size
        columns = shard_columns(full, ctx.tp.size, ctx.tp.rank)
        parts = [(name, full, columns) for name in ("gate_proj", "up_proj")]
        self._activation = config.activation
        self._activate: SiluAndMul | GeluAndMul = getattr(ctx.functions, f"{config.activation}_and_mul")
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, parts, config.bias, ctx)
        self.down_proj = row_parallel(full, partial(shard_columns, full), hidden_size, config.bias, ctx)

    def calls(self) -> Iterator[FunctionCall]:
        yield GatedActivationCall(self.down_proj.num_inputs, f"{self._activation}_and_mul")

    def _gate(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Gate and up projections of ``x_TD``, with the activation: (T, D) → (T, F)."""
        if not self.gate_up_proj.can_gate:
            return self._activate(self.gate_up_proj(x_TD))
        return self.gate_up_proj(x_TD, gate=self._activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """MLP output of the hidden states ``x_TD``, (T, D)."""
        return self.down_proj(self._gate(x_TD))

    def partial(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's summand of ``forward``, for callers that add other summands before the all-reduce."""
        return self.down_proj.partial(self._gate(x_TD))
