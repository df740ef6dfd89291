"""Gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from labinfer.functions.calls import FunctionCall, GatedActivationCall
from labinfer.functions.protocols import GeluAndMul, SiluAndMul
from labinfer.layers.context import StageContext
from labinfer.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from labinfer.layers.sharding import shard_columns

BLOCK_BYTES, ROWS = 16 * 2**20, 128
"""What a CPU's product with gate and up comes to at once, and the rows of which it has a multiple: larger tensors are mapped anew at
each call, and a third of the time goes into clearing their pages."""


@dataclass(frozen=True, kw_only=True)
class GatedMLPConfig:
    """``down(activation(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202) over the whole model."""

    intermediate_size: int
    bias: bool = False
    activation: Literal["silu", "gelu"] = "silu"
    """The GELU is its tanh form."""
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
        self._activation = f"{config.activation}_and_mul"
        self._activate: SiluAndMul | GeluAndMul = getattr(ctx.functions, self._activation)
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, parts, config.bias, ctx)
        self.down_proj = RowParallelLinear(full, columns, hidden_size, config.bias, ctx)

    def calls(self) -> Iterator[FunctionCall]:
        yield GatedActivationCall(self.down_proj.num_inputs, self._activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, D) → (T, D)."""
        return self.down_proj.add_up(self._in_blocks(x_TD, self.down_proj.product))

    def partial(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's summand of ``forward``, for one that adds other summands before the sum over the ranks."""
        return self._in_blocks(x_TD, self.down_proj.partial)

    def _in_blocks(self, x_TD: torch.Tensor, down: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        row_bytes = self.gate_up_proj.num_outputs * x_TD.element_size()
        rows = max(1, BLOCK_BYTES // (ROWS * row_bytes)) * ROWS
        if x_TD.device.type != "cpu" or len(x_TD) <= rows:
            return down(self._activate(self.gate_up_proj(x_TD)))
        return torch.cat([down(self._activate(self.gate_up_proj(block_TD))) for block_TD in x_TD.split(rows)])
