"""``PackedExperts``: a rank's experts of one layer in the memory that ``make_experts`` allocates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from labinfer.functions.clamped_gate import ClampedGate
from labinfer.weights.codes import Codes, QuantLayout, Range


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a rank's experts of one layer, argument of ``MakeExperts``."""

    num_experts: int
    """Experts that the rank holds, E; may be 0."""
    hidden_size: int
    """Hidden size, D."""
    columns: Range
    """Range of each expert's MLP columns that this rank holds."""
    dtype: torch.dtype
    """Dtype of the loaded weights, or of the dequantized codes."""
    form: QuantLayout | None = None
    """Quantized form of all experts of the layer in the checkpoint; None if they are not quantized."""

    @property
    def num_columns(self) -> int:
        """MLP columns that this rank holds, F."""
        return self.columns[1] - self.columns[0]


class PackedExperts(Protocol):
    """Gated MLPs of one shape in the weight layout of one implementation. Further fields are private to that implementation."""

    @property
    def num_experts(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Size in bytes of all packed experts, scales included; also known on the meta device."""

    @property
    def data_EB(self) -> torch.Tensor | None:
        """Packed bytes of each expert, (E, bytes) uint8; None if an expert is not contiguous in memory."""

    @property
    def addresses_E(self) -> torch.Tensor | None:
        """Address of each expert for the kernel, int64 in host memory; the kernel skips an expert with address 0. Writable. None if
        ``data_EB`` is None."""

    def parts(self, ids_TA: torch.Tensor, first: int) -> Iterable[tuple[PackedExperts, bool]]:
        """Yield (experts, is_last) for each part of the chosen experts, by ascending id; only the part's experts are in memory. A part is
        valid until the next one is requested. Without offload, a single part has all experts.

        Args:
            ids_TA: experts of each token.
            first: id of the rank's first expert.
        """

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        """Pack the matrices of one expert. The caller reuses their memory, so the implementation copies them.

        Args:
            index: 0 … E - 1.
            gate_up_FD: (2F, D), the gate's rows before the up projection's; contiguous, in ``ExpertShape.dtype``.
            down_DF: (D, F); contiguous, in ``ExpertShape.dtype``.
        """

    def pack_codes(self, index: int, gate_up: Codes, down: Codes) -> None:
        """Pack the quantized matrices of one expert; only for experts made with an ``ExpertShape.form``, which is the form of the codes."""

    def clone(self) -> PackedExperts:
        """A copy with memory of its own for the weights."""


@dataclass(frozen=True, slots=True)
class ExpertMLPs:
    """A rank's experts of one layer, argument of ``Experts``."""

    packed: PackedExperts
    first: int = 0
    """Id of the first expert in ``packed``."""
    gate: ClampedGate | None = None
    """Activation with biases that replaces ``silu(gate) * up``; None for SiLU or GELU without biases."""
    gelu: bool = False
    """Whether the activation is GELU (tanh approximation) instead of SiLU; False if ``gate`` is given."""
