"""``ClampedMLP``: a gated MLP with the clamped activation of gpt-oss, for every token (MiniMax-M3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.functions.calls import FunctionCall
from labinfer.functions.reference.elementwise import sigmoid
from labinfer.models.families.layers.expert_biases import ClampedGateConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.mlp import GatedMLP, GatedMLPConfig


@dataclass(frozen=True, kw_only=True)
class ClampedMLPConfig(GatedMLPConfig):
    """Unsharded gated MLP whose activation is ``clamped_and_mul``."""

    gate: ClampedGateConfig

    def build(self, hidden_size: int, ctx: StageContext) -> ClampedMLP:
        return ClampedMLP(self, hidden_size, ctx)


class ClampedMLP(GatedMLP):
    """This rank's columns of the MLP."""

    def __init__(self, config: ClampedMLPConfig, hidden_size: int, ctx: StageContext):
        super().__init__(config, hidden_size, ctx)
        self._limits = config.gate

    def calls(self) -> Iterator[FunctionCall]:
        """No call but those of the matrices: the activation has one implementation."""
        return iter(())

    def _gate(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate = self._limits
        numbers = gate.alpha, gate.gate_limit, gate.limit, gate.offset
        return clamped_and_mul(self.gate_up_proj(x_TD), numbers)


def clamped_and_mul(
    gate_up_TF: torch.Tensor, numbers: tuple[float, float, float, float], out: torch.Tensor | None = None
) -> torch.Tensor:
    """``g * sigmoid(alpha * g) * (u + offset)`` of clamped halves g and u of each row, as in ``ClampedGate``: (T, 2F) → (T, F).

    Args:
        numbers: alpha, upper bound of g, upper bound of the magnitude of u, and offset.

    The arithmetic is in float32, and the bits of a result depend only on its g and u.
    """
    out = gate_up_TF.new_empty(len(gate_up_TF), gate_up_TF.shape[1] // 2) if out is None else out
    if has_torch_function((gate_up_TF,)):  # a capture records this as one torch operation
        return handle_torch_function(clamped_and_mul, (gate_up_TF,), gate_up_TF, numbers, out)
    alpha, gate_limit, limit, offset = numbers
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=1)
    gate_TF = gate_TF.clamp(max=gate_limit)
    return out.copy_(gate_TF * sigmoid(alpha * gate_TF) * (up_TF.clamp(-limit, limit) + offset))


clamped_and_mul.repeats_in_place = True
