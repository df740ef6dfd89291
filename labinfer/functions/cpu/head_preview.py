"""A head's preview over compiled functions: logits of which only the largest matters, see ``reference.head_preview``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.cpu.library import Library
from labinfer.functions.cpu.packed12 import CpuPacked12Weight
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.head_preview import GROUP, SIGMAS, HeadPreview
from labinfer.functions.packed_weight import PackedWeight, QuantizedWeight
from labinfer.functions.reference.head_preview import measure_preview


class CpuHeadPreview:
    """An implementation of the function of its name in each method.

    Args:
        library: see ``library.load``.
        linear: takes heads with an odd number of inputs, which the compiled functions have not.
        round_head: packs the head where that rounds it: the copy then stands for what was rounded.
        kernel: see ``CpuFunctions``.
    """

    def __init__(
        self,
        library: Library,
        linear: Callable,
        *,
        round_head: Callable[[torch.Tensor], QuantizedWeight] | None = None,
        kernel: str = "",
    ):
        self._library, self._linear, self._round_head = library, linear, round_head
        self._dense = library.find("largest_logits", kernel)
        self._packed12 = library.find("largest_logits12", kernel)

    def calls(self) -> dict[str, Callable]:
        """Methods by function."""
        return {"make_preview": self.make_preview, "largest_logits": self.largest_logits}

    def make_preview(self, weight_OI: torch.Tensor) -> HeadPreview:
        quantized = CpuQuantized(self._library)
        head = weight_OI if self._round_head is None else self._round_head(weight_OI)
        return measure_preview(head, quantized.quantize_int4(weight_OI, GROUP), quantized.embedding)

    def largest_logits(self, x_TI: torch.Tensor, weight: PackedWeight, preview: HeadPreview) -> torch.Tensor:
        is_int8 = isinstance(weight, QuantizedWeight)
        if not is_int8 and weight.inputs % 2:
            return self._linear(x_TI, weight)
        x_TI = x_TI.contiguous()
        out_TO = x_TI.new_empty(x_TI.shape[0], weight.outputs)
        call, scales, wide = self._dense, (), ()
        if is_int8:
            call, scales = self._library.largest_logits_int8, (weight.scales.data_ptr(),)
            wide = (int(x_TI.dtype == torch.float32),)
        elif isinstance(weight, CpuPacked12Weight):
            call = self._packed12
        call(
            x_TI.data_ptr(),
            weight.data.data_ptr(),
            *scales,
            preview.codes.data_ptr(),
            preview.spread_2O.data_ptr(),
            GROUP,
            preview.unit,
            SIGMAS,
            out_TO.data_ptr(),
            x_TI.shape[0],
            weight.outputs,
            weight.inputs,
            *wide,
            torch.get_num_threads(),
        )
        return out_TO
