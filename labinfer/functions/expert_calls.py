"""``ExpertsCall``: description of a call of a mixture's experts, for timing; see ``calls``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from labinfer.functions.calls import CallSetting, Work
from labinfer.functions.family_protocols import Experts, MakeExperts
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape, PackedExperts

ROUTINGS = 16
"""Number of routings that timed calls cycle through, so that experts are read from memory and not from the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class ExpertsCall:
    """A call of ``experts`` with this rank's experts of one layer."""

    quantization: str
    num_experts: int
    """Experts that this rank holds."""
    all_experts: int
    """Experts of the whole layer that the router chooses from."""
    num_chosen: int
    """Experts per token, A."""
    hidden_size: int
    columns: int
    num_timed: int | None = None
    """Number of the rank's experts that are allocated for timing, E; None for all."""
    target: str = "experts"

    @property
    def elements(self) -> int:
        return 3 * self._count * self.hidden_size * self.columns

    def cut(self, part: float) -> ExpertsCall:
        """A smaller call, with the fraction ``part`` of the weights: fewer experts, but at least ``num_chosen``, then
        fewer columns, rounded up to a multiple of 64."""
        count = min(self.num_experts, max(self.num_chosen, math.ceil(self.num_experts * part)))
        columns = self.columns * part * self.num_experts / max(1, count)
        return replace(self, num_timed=count, columns=min(self.columns, math.ceil(columns / 64) * 64))

    def pack(self, function: MakeExperts, setting: CallSetting) -> PackedExperts:
        shape = ExpertShape(self._count, self.hidden_size, (0, self.columns), setting.dtype)
        experts = function(shape, setting.device)
        gate_up_FD = setting.random(2 * self.columns, self.hidden_size)
        down_DF = setting.random(self.hidden_size, self.columns)
        for index in range(self._count):
            experts.pack(index, gate_up_FD, down_DF)
        return experts

    def bind(self, function: Experts, rows: int, setting: CallSetting) -> Callable[[PackedExperts], object]:
        x_TD = setting.random(rows, self.hidden_size)
        weights_TA = torch.full((rows, self.num_chosen), 1 / self.num_chosen, device=setting.device)
        routings = itertools.cycle(ids_TA.to(setting.device) for ids_TA in self.routings(rows))
        return lambda experts: function(x_TD, next(routings), weights_TA, ExpertMLPs(experts))

    def work(self, rows: int, setting: CallSetting) -> Work:
        chosen = sum(int((ids_TA < self._count).sum()) for ids_TA in self.routings(rows))
        operations = 2 * chosen * self.elements // max(1, self._count) // ROUTINGS
        return Work(2 * rows * self.hidden_size * setting.dtype.itemsize, operations)

    def read_bytes(self, packed_bytes: int, rows: int) -> int:
        """Bytes of the experts that some token chose, averaged over the routings."""
        chosen = sum(int((ids_TA.unique() < self._count).sum()) for ids_TA in self.routings(rows))
        return packed_bytes * chosen // max(1, self._count) // ROUTINGS

    def routings(self, rows: int) -> list[torch.Tensor]:
        """Random expert ids of ``rows`` tokens, (T, A) int64, for ``ROUTINGS`` batches; equal in every call.

        Ids are drawn from all experts of the layer, so that an expert has as many tokens as in a run. The chosen
        experts of this rank are mapped to those that are allocated. All other ids are out of range, as if another rank
        held these experts.
        """
        generator = torch.Generator().manual_seed(rows)
        routings = []
        for _ in range(ROUTINGS):
            ids_TA = torch.rand(rows, self.all_experts, generator=generator).topk(self.num_chosen, dim=1).indices
            chosen = ids_TA.unique()
            timed = chosen[chosen < self.num_experts][: self._count]
            numbers = torch.full((self.all_experts,), self.all_experts)
            numbers[timed] = torch.randperm(self._count, generator=generator)[: len(timed)]
            routings.append(numbers[ids_TA])
        return routings

    @property
    def _count(self) -> int:
        return self.num_experts if self.num_timed is None else self.num_timed
