"""``PackedExperts``: the experts that a rank holds of a layer, as ``make_experts`` makes room for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from labinfer.functions.clamped_gate import ClampedGate
from labinfer.weights.codes import CodeForm, Codes, Range


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts that a rank holds of a layer, as ``MakeExperts`` is told them."""

    num_experts: int
    """E; may be 0."""
    hidden_size: int
    """D."""
    columns: Range
    """Columns of each expert's MLP that this rank holds."""
    dtype: torch.dtype
    """Dtype of the weights as they are loaded, or that codes stand for."""
    form: CodeForm | None = None
    """Form of the codes in which the checkpoint holds all experts of the layer; None for values."""

    @property
    def num_columns(self) -> int:
        """F."""
        return self.columns[1] - self.columns[0]


class PackedExperts(Protocol):
    """Gated MLPs of one shape in the layout of one implementation. What else it has only that implementation knows."""

    @property
    def num_experts(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """All that the experts take once they are packed, scales included; also on the meta device."""

    @property
    def data_EB(self) -> torch.Tensor | None:
        """Each expert in so many bytes, uint8; None where an expert is not in one stretch of memory."""

    @property
    def addresses_E(self) -> torch.Tensor | None:
        """Address of each expert for the kernel, int64 in host memory, 0 for one that it is to leave out; may be changed.
        None as above."""

    def parts(self, ids_TA: torch.Tensor, first: int) -> Iterable[tuple[PackedExperts, bool]]:
        """The same experts, with those in place that tokens chose: all at once, or by ascending ids in several parts, each
        until the next is asked for. With each part, whether it is the last."""

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        """Bring the matrices of one expert in. Their memory is used again, so nothing may keep them.

        Args:
            index: 0 … E - 1.
            gate_up_FD: (2F, D), the gate's rows before those of the other projection; contiguous, in ``ExpertShape.dtype``.
            down_DF: (D, F), likewise.
        """

    def pack_codes(self, index: int, gate_up: Codes, down: Codes) -> None:
        """The same for experts that were made with an ``ExpertShape.form``, in which these are."""

    def clone(self) -> PackedExperts:
        """The same experts in memory of their own."""


@dataclass(frozen=True, slots=True)
class ExpertMLPs:
    """The gated MLPs of a layer's experts that a rank holds, as ``Experts`` is given them."""

    packed: PackedExperts
    first: int = 0
    """Id of the first of these experts."""
    gate: ClampedGate | None = None
    """Activation in the place of ``silu(gate) * up``, with biases; None where there are none."""
    gelu: bool = False
    """Whether the GELU's tanh form takes the place of the SiLU; not beside ``gate``."""
