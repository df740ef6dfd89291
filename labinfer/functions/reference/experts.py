"""The chosen experts of a mixture, one after another."""

from __future__ import annotations

from copy import copy

import torch

from labinfer.functions.clamped_gate import ClampedGate
from labinfer.functions.family_protocols import PackCodes
from labinfer.functions.packed_experts import ExpertForm, MatrixCodes
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.protocols import Linear, PackWeight
from labinfer.functions.reference.elementwise import gelu_and_mul, silu_and_mul


class ReferenceExperts:
    """Each expert's two matrices as ``pack_weight`` or ``pack_codes`` leaves them.

    Args:
        pack_weight, linear, pack_codes: of the quantization that the weights are to have; no codes are held without one.
    """

    data_EB = addresses_E = None

    def __init__(
        self,
        pack_weight: PackWeight,
        linear: Linear,
        pack_codes: PackCodes | None = None,
        *,
        num_experts: int,
        hidden_size: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm | None = None,
    ):
        self.num_experts, self.hidden_size, self.columns = num_experts, hidden_size, columns
        self.dtype, self.device, self.linear = dtype, device, linear
        self.pairs: list[tuple[PackedWeight, PackedWeight] | None] = [None] * num_experts
        """For each expert gate with up, and down; None before they are packed."""
        self._pack_weight, self._pack_codes, self._form = pack_weight, pack_codes, form
        lead = form.down_lead if form is not None else 0
        self._matrices = (2 * columns, hidden_size, 0), (hidden_size, columns, lead)
        """Outputs, inputs and ``lead`` of gate with up, and of down."""

    def parts(self, ids_TA: torch.Tensor, first: int) -> tuple[tuple[ReferenceExperts, bool]]:
        return ((self, True),)

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        self.pairs[index] = self._pack_weight(gate_up_FD.clone()), self._pack_weight(down_DF.clone())

    def pack_codes(self, index: int, gate_up: MatrixCodes, down: MatrixCodes) -> None:
        self.pairs[index] = tuple(
            self._packed(
                codes.words.clone(),
                codes.scales.clone(),
                None if codes.zeros is None else codes.zeros.clone(),
                None if codes.minima is None else codes.minima.clone(),
                inputs=inputs,
                lead=lead,
            )
            for codes, (_, inputs, lead) in zip((gate_up, down), self._matrices, strict=True)
        )

    def _packed(
        self,
        words_OW: torch.Tensor,
        scales_OG: torch.Tensor,
        zeros_OG: torch.Tensor | None,
        minima_OG: torch.Tensor | None,
        *,
        inputs: int,
        lead: int,
    ) -> PackedWeight:
        form = {"bits": self._form.bits, "table": self._form.table, "group": self._form.group, "lead": lead}
        return self._pack_codes(words_OW, scales_OG, zeros_OG, minima_OG, inputs=inputs, dtype=self.dtype, **form)

    @property
    def nbytes(self) -> int:
        return self.num_experts * sum(self._empty(*matrix).nbytes for matrix in self._matrices)

    def _empty(self, outputs: int, inputs: int, lead: int) -> PackedWeight:
        """A packed matrix without memory behind it."""
        form = self._form
        if form is None:
            return self._pack_weight(torch.empty(outputs, inputs, dtype=self.dtype, device="meta"))
        groups = -(-(lead + inputs) // form.group) if form.group else 1
        words = -(-(groups * form.group or inputs) * form.bits // 32)
        scales_OG = torch.empty(outputs, groups, device="meta")
        zeros_OG = scales_OG.to(torch.uint8) if form.has_zeros else None
        minima_OG = scales_OG if form.has_minima else None
        words_OW = torch.empty(outputs, words, dtype=torch.int32, device="meta")
        return self._packed(words_OW, scales_OG, zeros_OG, minima_OG, inputs=inputs, lead=lead)

    def clone(self) -> ReferenceExperts:
        same = copy(self)
        same.pairs = [pair and (pair[0].clone(), pair[1].clone()) for pair in self.pairs]
        return same


def experts(
    x_TD: torch.Tensor,
    expert_ids_TA: torch.Tensor,
    weights_TA: torch.Tensor,
    experts: ReferenceExperts,
    *,
    first: int = 0,
    gate: ClampedGate | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs: (T, D) → (T, D). Ids that are not here add nothing."""
    local_TA, activate = expert_ids_TA - first, gelu_and_mul if gelu else silu_and_mul
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for index in local_TA.unique().tolist():
        if 0 <= index < experts.num_experts:
            gate_up, down = experts.pairs[index]
            token, slot = torch.where(local_TA == index)
            products = experts.linear(x_TD[token], gate_up)
            middle = activate(products) if gate is None else gate.activate(products, index)
            part = experts.linear(middle, down).float()
            if gate is not None:
                part = part + gate.down_ED[index, : part.shape[1]]
            part = part * weights_TA[token, slot].unsqueeze(1)
            out_TD.index_add_(0, token, part)
    return out_TD.to(x_TD.dtype)
