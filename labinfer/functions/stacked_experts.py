"""``StackedExperts``: a layer's experts on this rank with their matrices stacked, for kernels that multiply the matrices of all experts at once."""

from __future__ import annotations

import dataclasses
from copy import copy

import torch

from labinfer.functions.packed_weight import PackedWeight, QuantizedWeight
from labinfer.functions.reference.experts import ReferenceExperts
from labinfer.weights.codes import Codes


class StackedMatrix:
    """One matrix of every expert, stacked: its tensors have a leading expert dimension.

    Args:
        count: number of experts.
    """

    def __init__(self, count: int):
        self._count = count
        self.weight: PackedWeight | None = None
        """Stacked matrices of all experts; None before the first ``put``."""
        self.global_scales_E: torch.Tensor | None = None
        """``QuantizedWeight.global_scale`` of each expert, float32; None for weights that are not quantized."""

    def put(self, index: int, weight: PackedWeight) -> PackedWeight:
        """Copy the matrix of expert ``index`` into the stack. Returns the copy, whose tensors are views of the stack."""
        tensors = {name: value for name, value in _fields(weight).items() if isinstance(value, torch.Tensor)}
        if self.weight is None:
            stacked = {name: x.new_zeros(self._count, *x.shape) for name, x in tensors.items()}
            self.weight = dataclasses.replace(weight, **stacked)
            if isinstance(weight, QuantizedWeight):
                self.global_scales_E = torch.ones(self._count, dtype=torch.float32, device=weight.device)
        views = {name: getattr(self.weight, name)[index] for name in tensors}
        for name, view in views.items():
            view.copy_(tensors[name])
        if self.global_scales_E is not None:
            self.global_scales_E[index] = weight.global_scale
        return dataclasses.replace(weight, **views)


class StackedExperts(ReferenceExperts):
    """Experts with the reference's interface whose matrices are stacked."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.gate_up, self.down = StackedMatrix(self.num_experts), StackedMatrix(self.num_experts)

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        super().pack(index, gate_up_FD, down_DF)
        self._stack(index)

    def pack_codes(self, index: int, gate_up: Codes, down: Codes) -> None:
        super().pack_codes(index, gate_up, down)
        self._stack(index)

    def clone(self) -> StackedExperts:
        same = copy(self)
        same.pairs = list(self.pairs)
        same.gate_up, same.down = StackedMatrix(self.num_experts), StackedMatrix(self.num_experts)
        for index, pair in enumerate(same.pairs):
            if pair is not None:
                same._stack(index)
        return same

    def _stack(self, index: int) -> None:
        gate_up, down = self.pairs[index]
        self.pairs[index] = self.gate_up.put(index, gate_up), self.down.put(index, down)


def _fields(weight: PackedWeight) -> dict[str, object]:
    return {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
