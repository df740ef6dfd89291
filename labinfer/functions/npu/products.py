"""Products with int8 weights by ``npu_quant_matmul`` and with int4 weights by ``npu_weight_quant_batchmatmul``.

Products with other weights, and with activations in float32, are multiplied in the activations' dtype after dequantization. Limits are
those of the operators' pages in docs/zh/custom_APIs/torch_npu of Ascend/op-plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from labinfer.functions.npu.elementwise import HALF_DTYPES
from labinfer.functions.packed_weight import QuantizedWeight, clone_tensors
from labinfer.functions.reference import quantized
from labinfer.weights.codes import Codes, QuantLayout

MAX_SIZE = 65535
"""Maximum number of inputs, and of outputs, in one call of the operators."""
LEAST_GROUP = 32
"""Group sizes that the operator supports are multiples of this number."""
CODES_PER_WORD = 8
SIGN_BITS = 0x88
"""Highest bits of the two codes of a byte. Inverting them converts codes from 0 … 15 to two's complement, -8 … 7."""
WIDE_BYTES = 64 << 20
"""Maximum bytes of dequantized weights; larger matrices are dequantized some rows at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """An int4 matrix as the operator reads it: a weight is ``(code + offset) * scale``."""

    data: torch.Tensor
    """Codes in two's complement, (outputs, inputs / 8) int32; the first input in the lowest bits."""
    scales: torch.Tensor
    """(groups, outputs) in ``dtype``."""
    offsets: torch.Tensor
    """Middle code minus zero point, (groups, outputs) in ``dtype``."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    group: int

    @property
    def exact_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + self.offsets.nbytes

    def clone(self) -> Int4Weight:
        return clone_tensors(self)


def multiplies(form: QuantLayout) -> bool:
    """Whether weights of a checkpoint in ``form`` are multiplied without dequantization."""
    if form.bits == 8:
        return not form.group
    return form.bits == 4 and not form.table and not form.has_minima and form.group % LEAST_GROUP == 0


def quantize_int4(weight_OI: torch.Tensor, group: int) -> QuantizedWeight | Int4Weight:
    """Quantize a matrix to int4, see ``reference.quantized.quantize_int4``, in the operator's weight layout if the operator supports the sizes."""
    return _to_int4(quantized.quantize_int4(weight_OI, group))


def pack_codes(codes: Codes, dtype: torch.dtype) -> QuantizedWeight | Int4Weight:
    """Pack a checkpoint's quantized weights without changing their codes, in the operator's weight layout if the operator supports the codes."""
    return _to_int4(quantized.pack_codes(codes, dtype))


def _to_int4(weight: QuantizedWeight) -> QuantizedWeight | Int4Weight:
    fits = (
        weight.dtype in HALF_DTYPES
        and (weight.bits, weight.lead, weight.minima, weight.table) == (4, 0, None, "")
        and weight.group % LEAST_GROUP == 0
        and weight.inputs % LEAST_GROUP == 0
        and weight.inputs <= MAX_SIZE
    )
    if not fits or not weight.outputs:
        return weight
    data = (weight.data[:, : weight.inputs // 2] ^ SIGN_BITS).contiguous().view(torch.int32)
    scales_GO = (weight.scales.float() * weight.global_scale).to(weight.dtype).t().contiguous()
    offsets_GO = torch.zeros_like(scales_GO) if weight.zeros is None else 8 - weight.zeros.t().to(weight.dtype)
    return Int4Weight(
        data=data,
        scales=scales_GO,
        offsets=offsets_GO.contiguous(),
        outputs=weight.outputs,
        inputs=weight.inputs,
        dtype=weight.dtype,
        group=weight.group,
    )


def int8_linear(
    ops: ModuleType, x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Product with activations that are quantized to int8 with a scale per row: (T, I) → (T, O) in x's dtype."""
    is_empty = not x_TI.numel() or not weight.outputs
    if weight.group or x_TI.dtype not in HALF_DTYPES or is_empty or weight.inputs > MAX_SIZE:
        return dequantized_linear(x_TI, weight, bias_O)
    data_TI, scales_T = ops.npu_dynamic_quant(x_TI)
    bias_O = None if bias_O is None else bias_O.float()

    def multiply(outputs: slice) -> torch.Tensor:
        return ops.npu_quant_matmul(
            data_TI,
            weight.data[outputs].t(),
            weight.scales[outputs],
            pertoken_scale=scales_T,
            bias=None if bias_O is None else bias_O[outputs],
            output_dtype=x_TI.dtype,
        )

    return _by_outputs(multiply, weight.outputs, MAX_SIZE)


def int4_linear(
    ops: ModuleType, x_TI: torch.Tensor, weight: QuantizedWeight | Int4Weight, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Product with weights that the operator dequantizes: (T, I) → (T, O) in x's dtype."""
    if isinstance(weight, QuantizedWeight):
        return dequantized_linear(x_TI, weight, bias_O)
    if x_TI.dtype != weight.dtype or not x_TI.numel():
        return dequantized_linear(x_TI, _rows(weight, slice(None)), bias_O)
    x_TI = x_TI.contiguous()
    if bias_O is not None and x_TI.dtype == torch.bfloat16:
        bias_O = bias_O.float()  # a bias in bfloat16 is not supported

    def multiply(outputs: slice) -> torch.Tensor:
        return ops.npu_weight_quant_batchmatmul(
            x_TI,
            weight.data[outputs].t(),
            weight.scales[:, outputs].contiguous(),
            weight.offsets[:, outputs].contiguous(),
            bias=None if bias_O is None else bias_O[outputs].contiguous(),
            antiquant_group_size=weight.group if weight.group < weight.inputs else 0,
        )

    return _by_outputs(multiply, weight.outputs, MAX_SIZE)


def embedding(token_ids_T: torch.Tensor, table: QuantizedWeight | Int4Weight, first: int) -> torch.Tensor:
    """Rows of a vocabulary slice that begins at id ``first``: (T,) → (T, D); ids outside the slice give zeros."""
    if isinstance(table, QuantizedWeight):
        return quantized.embedding(token_ids_T, table, first)
    local_T = token_ids_T - first
    outside_T = (local_T < 0) | (local_T >= table.outputs)
    rows = _rows(table, local_T.clamp(0, table.outputs - 1))
    return quantized.dequantize(rows).to(table.dtype).masked_fill_(outside_T.unsqueeze(1), 0)


def dequantized_linear(x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Product with the dequantized matrix in x's dtype: (T, I) → (T, O)."""

    def multiply(outputs: slice) -> torch.Tensor:
        return F.linear(x_TI, quantized.dequantize(weight, outputs).to(x_TI.dtype))

    out_TO = _by_outputs(multiply, weight.outputs, max(1, WIDE_BYTES // (4 * max(1, weight.inputs))))
    return out_TO if bias_O is None else out_TO + bias_O


def _by_outputs(multiply: Callable[[slice], torch.Tensor], outputs: int, most: int) -> torch.Tensor:
    """Compute a product in parts of at most ``most`` outputs, and join the parts."""
    parts = [multiply(slice(begin, min(begin + most, outputs))) for begin in range(0, max(1, outputs), most)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rows(weight: Int4Weight, rows: slice | torch.Tensor) -> QuantizedWeight:
    """Rows of an int4 matrix, converted to the weight layout of the reference."""
    data = weight.data[rows].contiguous().view(torch.uint8) ^ SIGN_BITS
    padding = weight.scales.shape[0] * weight.group // 2 - data.shape[1]
    return QuantizedWeight(
        data=F.pad(data, (0, padding)),
        scales=weight.scales.t()[rows],
        outputs=len(data),
        inputs=weight.inputs,
        dtype=weight.dtype,
        bits=4,
        group=weight.group,
        zeros=8 - weight.offsets.t()[rows],
    )
