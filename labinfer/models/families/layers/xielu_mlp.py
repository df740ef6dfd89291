"""``XieluMLP``: an MLP without gate whose activation, xIELU, has learned coefficients (Apertus)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.models.families.layers.ungated_mlp import UngatedMLP
from labinfer.models.layers.context import StageContext
from labinfer.weights.slices import TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class XieluMLPConfig:
    """Unsharded MLP, ``down(xielu(up(x)))``."""

    intermediate_size: int
    has_experts: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False
    num_sums: ClassVar[int] = 1

    def build(self, hidden_size: int, ctx: StageContext) -> XieluMLP:
        return XieluMLP(self.intermediate_size, hidden_size, ctx)


class XieluMLP(UngatedMLP):
    """This rank's columns of the MLP."""

    def __init__(self, intermediate_size: int, hidden_size: int, ctx: StageContext):
        super().__init__(intermediate_size, hidden_size, ctx)
        self.act_fn = Xielu()

    def activate(self, x_TF: torch.Tensor) -> torch.Tensor:
        return self.act_fn(x_TF)


class Xielu(WeightedModule):
    """The activation, replicated on every rank. The checkpoint's ``alpha_p`` and ``alpha_n`` are inputs of a softplus."""

    def __init__(self):
        super().__init__()
        self.coefficients = empty_parameter(4, dtype=torch.float32)
        """Positive alpha, negative alpha, beta and eps; see ``xielu``."""

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Activate ``x_TF``; same shape and dtype."""
        return xielu(x_TF, self.coefficients)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        for index, (name, shape) in enumerate((("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))):
            destination = self.coefficients[index : index + 1].view(shape)
            yield TensorSlice(name=f"{prefix}.{name}", shape=shape, destination=destination)

    def pack(self) -> None:
        alphas, beta = self.coefficients[:2], self.coefficients[2]
        alphas.copy_(F.softplus(alphas))
        alphas[1] += beta


def xielu(x: torch.Tensor, coefficients: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """xIELU (Huang & Schlag 2024, arXiv:2411.13010): ``p * x² + beta * x`` for x above 0, else ``n * (exp(min(x, eps)) - 1 - x) + beta * x``.

    Args:
        coefficients: p, n, beta and eps, float32. The arithmetic is in float32, and the bits of a result depend only on its x.
    """
    out = x.new_empty(x.shape) if out is None else out
    if has_torch_function((x,)):  # a capture records this as one torch operation
        return handle_torch_function(xielu, (x,), x, coefficients, out)
    positive, negative, beta, eps = coefficients
    wide = x.float()
    below = (torch.minimum(wide, eps).exp_() - 1 - wide) * negative
    return out.copy_(torch.where(wide > 0, wide * wide * positive, below) + beta * wide)


xielu.repeats_in_place = True
