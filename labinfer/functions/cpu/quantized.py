"""Compiled functions for weights in 8, 5 and 4 bits; activations in bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.cpu.dense import PANEL, Finish, sum_products
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.library import Library, new_bytes, readable
from labinfer.functions.packed_weight import POWERS_OF_TWO, TABLES, QuantizedWeight
from labinfer.functions.reference.quantized import choose_global_scale, shared_global_scale
from labinfer.functions.segmented_weight import SegmentedWeight
from labinfer.weights.codes import Codes

QUAD = 4
"""Inputs that one integer dot-product instruction multiplies."""
SCALE_BYTES = 2
HALF = 0.5
"""``QuantizedWeight.global_scale`` of weights with power-of-two scales: it halves the values in ``TABLES``, which are stored doubled."""
CODINGS = tuple(TABLES)
NONE, ZEROS, MINIMA = range(3)
"""Values of the enum of group offsets in rounded.h: none, zero points, minima."""


class CpuQuantized:
    """Products with quantized weights; ``reference.quantized`` defines their results.

    Args:
        library: see ``library.load``.
        kernel: kernel of the products: ``"amx"`` (AMX tiles), or ``""`` for vector instructions. Both give equal bits.
        in_bytes: whether to widen 4- and 5-bit weights to int8 before the product, with ``library.bytes_kernel``. Each weight is
            then rounded to a multiple of 1/127 of the largest weight of its output. With float32 activations, or with weights that
            have minima, products do not widen.
    """

    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    """Dtypes of activations; float16 is converted to float32."""

    def __init__(self, library: Library, kernel: str = "", *, in_bytes: bool = False):
        self.kernel, self.in_bytes, self._library = kernel, in_bytes, library
        self._linear_int8 = library.find("linear_int8", kernel)
        self._sum_int8 = library.find("sum_linear_int8", kernel)
        self._linear_groups = library.find("linear_groups", "bytes" if in_bytes else kernel)
        self._sum_groups = library.find("sum_linear_groups", "bytes" if in_bytes else kernel)
        self._floats = {dtype: CpuFunctions(library, dtype=dtype) for dtype in self.dtypes}

    def quantize_int8(self, weight_OI: torch.Tensor) -> QuantizedWeight:
        outputs, inputs = weight_OI.shape
        weight_OI, dtype = readable(weight_OI), weight_OI.dtype
        rows = _up_to(outputs, PANEL)
        data = new_bytes(rows * _up_to(inputs, QUAD))
        scales_O = weight_OI.new_empty(rows, dtype=torch.float32)
        self._library.quantize_int8(
            weight_OI.data_ptr(),
            data.data_ptr(),
            scales_O.data_ptr(),
            outputs,
            inputs,
            _wide(weight_OI),
            torch.get_num_threads(),
        )
        return QuantizedWeight(data=data, scales=scales_O, outputs=outputs, inputs=inputs, dtype=dtype)

    def quantize_int4(self, weight_OI: torch.Tensor, group: int) -> QuantizedWeight:
        outputs, inputs = weight_OI.shape
        weight_OI, dtype = readable(weight_OI), weight_OI.dtype
        groups = _up_to(inputs, group) // group
        global_scale = choose_global_scale(weight_OI)
        data = new_bytes(_up_to(outputs, PANEL) * groups * (SCALE_BYTES + group // 2))
        self._library.quantize_int4(
            weight_OI.data_ptr(),
            data.data_ptr(),
            outputs,
            inputs,
            group,
            global_scale,
            _wide(weight_OI),
            torch.get_num_threads(),
        )
        return QuantizedWeight(
            data=data,
            scales=data.new_empty(0),
            outputs=outputs,
            inputs=inputs,
            dtype=dtype,
            bits=4,
            group=group,
            global_scale=global_scale,
        )

    def pack_codes(self, codes: Codes, dtype: torch.dtype) -> QuantizedWeight:
        form, (outputs, words) = codes.form, codes.words.shape
        rows, groups = _up_to(outputs, PANEL), codes.scales.shape[1]
        words_OW, scales_OG = codes.words.contiguous(), codes.scales.contiguous()
        offsets_OG = codes.minima if codes.zeros is None else codes.zeros
        offsets_OG = None if offsets_OG is None else offsets_OG.contiguous()
        row_bytes, global_scale = words * QUAD, 1.0
        if form.group:
            scale_bytes = 1 if form.table in POWERS_OF_TWO else SCALE_BYTES
            row_bytes = groups * (scale_bytes + SCALE_BYTES * (offsets_OG is not None) + form.group * form.bits // 8)
            global_scale = codes_global_scale(codes)
        data = new_bytes(rows * row_bytes)
        output_scales = scales_OG.new_empty(0 if form.group else rows)
        self._library.pack_codes(
            words_OW.data_ptr(),
            scales_OG.data_ptr(),
            None if offsets_OG is None else offsets_OG.data_ptr(),
            data.data_ptr(),
            output_scales.data_ptr(),
            outputs,
            groups * form.group or codes.num_inputs,
            form.group,
            form.bits,
            CODINGS.index(form.table),
            offset_kind(codes.zeros is not None, codes.minima is not None),
            global_scale,
            torch.get_num_threads(),
        )
        return QuantizedWeight(
            data=data,
            scales=output_scales,
            zeros=None if codes.zeros is None else data.new_empty(0),
            minima=None if codes.minima is None else data.new_empty(0),
            table=form.table,
            outputs=outputs,
            inputs=codes.num_inputs,
            dtype=dtype,
            bits=form.bits,
            group=form.group,
            lead=codes.lead,
            global_scale=global_scale,
        )

    def linear(
        self, x_TI: torch.Tensor, weight: QuantizedWeight | SegmentedWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, SegmentedWeight):
            return self._sum_products(x_TI, weight)
        return self._product(x_TI, weight, bias_O, Finish.NOTHING)

    def gated_linear(
        self, x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None = None, *, gelu: bool = False
    ) -> torch.Tensor:
        finish = Finish.gate(gelu)
        if not finish.takes(weight.outputs) or x_TI.dtype == torch.float16:
            return self._floats[x_TI.dtype].activate(self.linear(x_TI, weight, bias_O), gelu)
        return self._product(x_TI, weight, bias_O, finish)

    def _sum_products(self, x_TI: torch.Tensor, weight: SegmentedWeight) -> torch.Tensor:
        first, wide = weight.segments[0], x_TI.dtype != torch.bfloat16
        if first.group:
            form = first.group, first.bits, *_coding(first)
            out_TO = sum_products(self._sum_groups, readable(x_TI), weight, *form, wide)
        else:
            out_TO = sum_products(self._sum_int8, readable(x_TI), weight, wide)
        return out_TO if weight.num_sums else out_TO.to(x_TI.dtype)

    def _product(
        self, x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None, finish: Finish
    ) -> torch.Tensor:
        if not weight.group:
            scales = (weight.scales.data_ptr(),)
            return self._multiply(self._linear_int8, x_TI, weight, bias_O, finish, scales=scales)
        form = weight.group, weight.lead, weight.bits, *_coding(weight), weight.global_scale
        return self._multiply(self._linear_groups, x_TI, weight, bias_O, finish, form=form)

    def _multiply(
        self,
        call: Callable,
        x_TI: torch.Tensor,
        weight: QuantizedWeight,
        bias_O: torch.Tensor | None,
        finish: Finish,
        *,
        scales: tuple[int, ...] = (),
        form: tuple[float, ...] = (),
    ) -> torch.Tensor:
        """Call a product; ``scales`` and ``form`` are arguments that only some of the library's products have."""
        dtype, x_TI = x_TI.dtype, x_TI.contiguous()
        if dtype == torch.float16:
            x_TI, bias_O = x_TI.float(), None if bias_O is None else bias_O.float()
        out_TO = finish.empty(x_TI, weight.outputs)
        call(
            x_TI.data_ptr(),
            weight.data.data_ptr(),
            *scales,
            None if bias_O is None else bias_O.data_ptr(),
            out_TO.data_ptr(),
            x_TI.shape[0],
            weight.outputs,
            weight.inputs,
            *form,
            dtype != torch.bfloat16,
            finish,
            torch.get_num_threads(),
        )
        return out_TO.half() if dtype == torch.float16 else out_TO

    def embedding(self, token_ids_T: torch.Tensor, table: QuantizedWeight, first: int) -> torch.Tensor:
        call, scales, form = self._library.embedding_int8, (table.scales.data_ptr(),), ()
        if table.group:
            call, scales = self._library.embedding_groups, ()
            form = table.group, table.lead, table.bits, *_coding(table), table.global_scale
        out_TD = readable(table.data.new_empty(token_ids_T.shape[0], table.inputs, dtype=table.dtype))
        call(
            token_ids_T.data_ptr(),
            table.data.data_ptr(),
            *scales,
            out_TD.data_ptr(),
            token_ids_T.shape[0],
            table.outputs,
            table.inputs,
            first,
            *form,
            _wide(out_TD),
            torch.get_num_threads(),
        )
        return out_TD.to(table.dtype)


def codes_global_scale(codes: Codes) -> float:
    """Power of two that multiplies all group scales and minima."""
    return HALF if codes.form.table in POWERS_OF_TWO else shared_global_scale(codes.scales, codes.minima)


def offset_kind(has_zeros: bool, has_minima: bool) -> int:
    """Enum value of the group offsets in rounded.h."""
    return ZEROS if has_zeros else MINIMA if has_minima else NONE


def _coding(weight: QuantizedWeight) -> tuple[int, int]:
    """Enum values of the code table and of the group offsets."""
    return CODINGS.index(weight.table), offset_kind(weight.zeros is not None, weight.minima is not None)


def _up_to(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _wide(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.float32)
