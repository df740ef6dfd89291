"""``PackedExperts``: the experts that a rank holds of a layer, as ``make_experts`` makes room for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """The form of codes in which a checkpoint holds all experts of a layer; terms as in ``PackCodes``."""

    bits: int
    """4, 5 or 8."""
    group: int
    has_zeros: bool
    has_minima: bool = False
    table: str = ""
    down_lead: int
    """``lead`` of down; the inputs of gate and up are never cut, so they have none."""


class MatrixCodes(Protocol):
    """A matrix in codes, as ``PackCodes`` is given one."""

    @property
    def words(self) -> torch.Tensor: ...

    @property
    def scales(self) -> torch.Tensor: ...

    @property
    def zeros(self) -> torch.Tensor | None: ...

    @property
    def minima(self) -> torch.Tensor | None: ...


class PackedExperts(Protocol):
    """Gated MLPs of one shape in the layout of one implementation. What else it has only that implementation knows."""

    @property
    def num_experts(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def columns(self) -> int:
        """Columns of each expert's MLP."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices they are made of."""

    @property
    def device(self) -> torch.device: ...

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
            gate_up_FD: (2F, D), the gate's rows before those of the other projection; contiguous, in ``dtype``.
            down_DF: (D, F), likewise.
        """

    def pack_codes(self, index: int, gate_up: MatrixCodes, down: MatrixCodes) -> None:
        """The same for experts that were made with an ``ExpertForm``, in which these are."""

    def clone(self) -> PackedExperts:
        """The same experts in memory of their own."""
