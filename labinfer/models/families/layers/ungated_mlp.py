"""``UngatedMLP``: base of MLPs without gate."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from labinfer.models.layers.context import StageContext
from labinfer.models.layers.linear import MergedColumnParallelLinear, row_parallel
from labinfer.models.layers.sharding import shard_columns


class UngatedMLP(nn.Module):
    """This rank's columns of an MLP, ``down(activate(up(x)))``.

    Args:
        intermediate_size: number of columns, unsharded.
    """

    def __init__(self, intermediate_size: int, hidden_size: int, ctx: StageContext, *, bias: bool = False):
        super().__init__()
        columns = partial(shard_columns, intermediate_size)
        part = ("up_proj", intermediate_size, columns(ctx.tp.size, ctx.tp.rank))
        self.up_proj = MergedColumnParallelLinear(hidden_size, [part], bias, ctx)
        self.down_proj = row_parallel(intermediate_size, columns, hidden_size, bias, ctx)

    def activate(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Activation of the up projection; same shape and dtype."""
        raise NotImplementedError

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, D) → (T, D), summed over the TP ranks."""
        return self.down_proj(self.activate(self.up_proj(x_TD)))
