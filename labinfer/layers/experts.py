"""The experts of a mixture that a rank holds: of every expert some columns, or some experts whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch

from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.packed_experts import PackedExperts
from labinfer.layers.context import StageContext
from labinfer.layers.sharding import shard_columns, shard_experts
from labinfer.weights.slices import MatrixSlice, MatrixStack, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter

Projection = Literal["gate_proj", "up_proj", "down_proj"]


class Experts(WeightedModule):
    """Gated MLPs of one shape, of which each token has some; their partial sums are to be added up over the ranks.

    They are loaded and packed one by one: a layer's experts never stand in memory as the checkpoint has them.

    Args:
        num_experts, columns: over the whole model.
    """

    def __init__(self, num_experts: int, columns: int, hidden_size: int, ctx: StageContext):
        super().__init__()
        self._functions = ctx.functions.experts
        self._num_experts, self._all_columns = num_experts, columns
        self._range, self._columns = (0, num_experts), (0, columns)
        if ctx.experts == "whole":
            self._range = shard_experts(num_experts, ctx.tp.size, ctx.tp.rank)
        else:
            self._columns = shard_columns(columns, ctx.tp.size, ctx.tp.rank)
        width = self._columns[1] - self._columns[0]
        self.packed: PackedExperts | None = None
        self.gate_up = empty_parameter(2 * width, hidden_size, dtype=ctx.dtype)
        self.down = empty_parameter(hidden_size, width, dtype=ctx.dtype)

    def forward(self, x_TD: torch.Tensor, ids_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
        """(T, D) → (T, D): this rank's part of the weighted sum of each token's experts."""
        return self._functions.experts(x_TD, ids_TA, weights_TA, self.packed, first=self._range[0])

    def call(self, num_chosen: int) -> ExpertsCall:
        """The call that a batch makes, for so many experts of each token."""
        hidden_size, width = self.down.shape
        return ExpertsCall(
            quantization=self._functions.quantization,
            num_experts=self._range[1] - self._range[0],
            all_experts=self._num_experts,
            num_chosen=num_chosen,
            hidden_size=hidden_size,
            columns=width,
        )

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        for expert in range(*self._range):
            yield from self._expert_slices(prefix, expert)

    def load(self, prefix: str, read: Callable[[WeightSlice], None]) -> None:
        gate_up_FD, down_DF = self.gate_up.detach(), self.down.detach()
        packed = self._make()
        for expert in range(*self._range):
            for part in self._expert_slices(prefix, expert):
                read(part)
            packed.pack(expert - self._range[0], gate_up_FD, down_DF)
        self.packed, self.gate_up, self.down = packed, None, None

    def pack(self) -> None:
        """Experts without weights, whose size counts."""
        self.packed, self.gate_up, self.down = self._make(), None, None

    def _make(self) -> PackedExperts:
        hidden_size, width = self.down.shape
        return self._functions.make_experts(
            num_experts=self._range[1] - self._range[0],
            hidden_size=hidden_size,
            columns=width,
            dtype=self.down.dtype,
            device=self.down.device,
        )

    def _expert_slices(self, prefix: str, expert: int) -> Iterator[MatrixSlice]:
        """Gate, up and down of one expert: from matrices of its own, or from two tensors with all experts."""
        hidden_size, width, full = self.down.shape[0], self.down.shape[1], self._all_columns

        def part(name: Projection, destination: torch.Tensor, stack: str, first_row: int) -> MatrixSlice:
            is_down = name == "down_proj"
            outputs, inputs = (hidden_size, full) if is_down else (full, hidden_size)
            return MatrixSlice(
                name=f"{prefix}.{expert}.{name}",
                outputs=outputs,
                inputs=inputs,
                rows=(0, outputs) if is_down else self._columns,
                columns=self._columns if is_down else (0, inputs),
                destination=destination,
                stack=MatrixStack(
                    name=f"{prefix}.{stack}",
                    shape=(self._num_experts, outputs if is_down else 2 * outputs, inputs),
                    index=expert,
                    first_row=first_row,
                ),
            )

        yield part("gate_proj", self.gate_up[:width], "gate_up_proj", 0)
        yield part("up_proj", self.gate_up[width:], "gate_up_proj", full)
        yield part("down_proj", self.down, "down_proj", 0)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (self.packed.nbytes if self.packed is not None else 0)
