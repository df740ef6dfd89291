"""Experts of a mixture, one expert after another."""

from __future__ import annotations

from collections import Counter
from copy import copy

import torch

from labinfer.functions.family_protocols import PackCodes
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.protocols import Linear, PackWeight
from labinfer.functions.reference.elementwise import gelu_and_mul, silu_and_mul
from labinfer.weights.codes import Codes, Range


class ReferenceExperts:
    """The two matrices of each expert, packed by ``pack_weight`` or ``pack_codes``.

    Args:
        pack_weight, linear, pack_codes: functions of the weights' quantization; ``pack_codes`` is None without quantization.
    """

    data_EB = addresses_E = None

    def __init__(
        self,
        pack_weight: PackWeight,
        linear: Linear,
        pack_codes: PackCodes | None,
        shape: ExpertShape,
        device: torch.device,
    ):
        self.num_experts, self.linear, self._shape = shape.num_experts, linear, shape
        self.pairs: list[tuple[PackedWeight, PackedWeight] | None] = [None] * shape.num_experts
        """Packed matrices (gate and up, down) of each expert; None before they are packed."""
        self._pack_weight, self._pack_codes = pack_weight, pack_codes

    def parts(self, ids_TA: torch.Tensor, first: int) -> tuple[tuple[ReferenceExperts, bool]]:
        return ((self, True),)

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        self.pairs[index] = self._pack_weight(gate_up_FD.clone()), self._pack_weight(down_DF.clone())

    def pack_codes(self, index: int, gate_up: Codes, down: Codes) -> None:
        self.pairs[index] = tuple(self._pack_codes(codes.clone(), self._shape.dtype) for codes in (gate_up, down))

    @property
    def nbytes(self) -> int:
        shape = self._shape
        matrices = (2 * shape.num_columns, (0, shape.hidden_size)), (shape.hidden_size, shape.columns)
        return self.num_experts * sum(self._empty(*matrix).nbytes for matrix in matrices)

    def _empty(self, outputs: int, columns: Range) -> PackedWeight:
        """A packed matrix on the meta device."""
        shape = self._shape
        if shape.form is not None:
            return self._pack_codes(Codes.empty(shape.form, outputs, columns, "meta"), shape.dtype)
        return self._pack_weight(torch.empty(outputs, columns[1] - columns[0], dtype=shape.dtype, device="meta"))

    def clone(self) -> ReferenceExperts:
        same = copy(self)
        same.pairs = [pair and (pair[0].clone(), pair[1].clone()) for pair in self.pairs]
        return same


def experts(
    x_TD: torch.Tensor, expert_ids_TA: torch.Tensor, weights_TA: torch.Tensor, mlps: ExpertMLPs
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs: (T, D) → (T, D). Ids of experts that ``mlps`` does not hold add nothing."""
    packed: ReferenceExperts = mlps.packed
    local_TA, activate, gate = expert_ids_TA - mlps.first, gelu_and_mul if mlps.gelu else silu_and_mul, mlps.gate
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    ids_N = local_TA.flatten()
    order_N = ids_N.argsort(stable=True)
    token_N, sorted_weights_N = order_N // local_TA.shape[1], weights_TA.flatten()[order_N]
    counts, end = Counter(ids_N.tolist()), 0  # the only copy to the host
    for index in sorted(counts):
        begin, end = end, end + counts[index]
        if 0 <= index < packed.num_experts:
            gate_up, down = packed.pairs[index]
            token = token_N[begin:end]
            products = packed.linear(x_TD[token], gate_up)
            middle = activate(products) if gate is None else gate.activate(products, index)
            part = packed.linear(middle, down).float()
            if gate is not None:
                part = part + gate.down_ED[index, : part.shape[1]]
            part = part * sorted_weights_N[begin:end].unsqueeze(1)
            out_TD.index_add_(0, token, part)
    return out_TD.to(x_TD.dtype)
