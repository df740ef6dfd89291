"""Biases of a rank's experts, and their clamped activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from labinfer.functions.clamped_gate import ClampedGate
from labinfer.models.layers.segments import without_segment
from labinfer.weights.slices import Range, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter

FILLED = 32
"""Granularity in outputs: experts' biases are zero-padded to a multiple of 32."""


@dataclass(frozen=True, kw_only=True)
class ClampedGateConfig:
    """Clamped activation of experts, see ``ClampedGate``."""

    alpha: float
    limit: float
    gate_limit: float
    has_biases: bool = True
    """Whether the experts have biases (gpt-oss). Their checkpoints store the experts' matrices transposed, with gate and up columns
    interleaved."""
    offset: float = 1.0


class ExpertBiases(WeightedModule):
    """Biases from ``mlp.experts.gate_up_proj_bias`` and ``mlp.experts.down_proj_bias``, in float32; zeros without ``config.has_biases``.

    Args:
        sizes: number of experts, columns of each, and outputs; unsharded.
        experts, columns: this rank's ranges.
        counts: whether this rank adds the output biases; if columns are sharded, only one rank does.
    """

    def __init__(
        self, config: ClampedGateConfig, sizes: tuple[int, int, int], experts: Range, columns: Range, *, counts: bool
    ):
        super().__init__()
        self._config, self._sizes, self._experts, self._columns, self._counts = config, sizes, experts, columns, counts
        count, width = experts[1] - experts[0], columns[1] - columns[0]
        self.gate_up = empty_parameter(count, 2 * width, dtype=torch.float32)
        self.down = empty_parameter(count, sizes[2], dtype=torch.float32)
        self.gate: ClampedGate | None = None

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        if not self._config.has_biases:
            return
        count, columns, outputs = self._sizes
        prefix, (begin, end) = without_segment(prefix), self._columns
        gate_up, down = {"ranges": (self._experts, (2 * begin, 2 * end))}, {"ranges": (self._experts,)}
        yield TensorSlice(
            name=f"{prefix}.gate_up", shape=(count, 2 * columns), destination=self.gate_up.detach(), **gate_up
        )
        yield TensorSlice(name=f"{prefix}.down", shape=(count, outputs), destination=self.down.detach(), **down)

    def pack(self) -> None:
        if not self._config.has_biases:
            self.gate_up.zero_(), self.down.zero_()
        down_ED = self.down.detach() if self._counts else torch.zeros_like(self.down)
        filled = [filled_up(x) for x in (self.gate_up.detach()[:, ::2], self.gate_up.detach()[:, 1::2], down_ED)]
        self.gate = ClampedGate(
            alpha=self._config.alpha,
            limit=self._config.limit,
            gate_limit=self._config.gate_limit,
            offset=self._config.offset,
            gate_EF=filled[0],
            up_EF=filled[1],
            down_ED=filled[2],
        )

    def import_packed(self, state: Mapping[str, Any]) -> None:
        super().import_packed(state)
        self.pack()

    @property
    def num_bytes(self) -> int:
        gate = self.gate
        copies = () if gate is None else (gate.gate_EF, gate.up_EF, gate.down_ED)
        return super().num_bytes + sum(tensor.nbytes for tensor in copies)


def filled_up(x_EF: torch.Tensor) -> torch.Tensor:
    """Zero-pad the last dimension to a multiple of ``FILLED``; contiguous."""
    return F.pad(x_EF, (0, -x_EF.shape[1] % FILLED)).contiguous()
