"""Compiled experts of a mixture, for all activation dtypes and for int8 and int4 weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from labinfer.functions.cpu.dense import PANEL
from labinfer.functions.cpu.library import Library, new_bytes, readable
from labinfer.functions.cpu.quantized import CODINGS, codes_global_scale, offset_kind
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.reference.quantized import choose_global_scale
from labinfer.weights.codes import Codes

WEIGHTS = {"int4": 0, "int8": 1, torch.bfloat16: 2, torch.float16: 3, torch.float32: 4, "int5": 5}
"""Weight formats and their enum values in experts.h."""


class CompiledExperts(ctypes.Structure):
    """C++ struct of experts.cpp for a layer's experts, declared for ctypes."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "columns", "weights", "group")),
        *((name, ctypes.c_int64) for name in ("coding", "offset", "lead")),
    ]


class CompiledCodes(ctypes.Structure):
    """C++ struct of experts.cpp for a quantized matrix, declared for ctypes; it keeps no tensor alive."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "offsets")),
        ("global_scale", ctypes.c_float),
    ]

    @classmethod
    def convert(cls, codes: Codes) -> CompiledCodes:
        assert codes.words.is_contiguous() and codes.scales.is_contiguous()
        offsets = codes.minima if codes.zeros is None else codes.zeros
        global_scale = codes_global_scale(codes) if codes.form.group else 1.0
        pointer = None if offsets is None else offsets.data_ptr()
        return cls(codes.words.data_ptr(), codes.scales.data_ptr(), pointer, global_scale)


class CompiledExpertsCall(ctypes.Structure):
    """C++ struct of experts.cpp for the arguments of a call, or of one part of a call, declared for ctypes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "out", "sums")),
        *((name, ctypes.c_int64) for name in ("tokens", "slots", "first")),
        *((name, ctypes.c_int32) for name in ("is_first", "is_last", "wide", "gelu")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "gate_limit", "offset")),
        *((name, ctypes.c_void_p) for name in ("gate_bias", "up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("bias_columns", "bias_outputs")),
    ]


class CpuPackedExperts:
    """Experts, each contiguous in memory; ``PackedExperts`` documents the other fields.

    Args:
        library: see ``library.load``.
        quantization: name of the weights' quantization.
        group: group size in int4, unless ``shape.form`` has one.
        data_EB: memory of the experts, uint8; allocated if None.
    """

    def __init__(
        self,
        library: Library,
        quantization: str,
        group: int,
        shape: ExpertShape,
        device: torch.device,
        *,
        data_EB: torch.Tensor | None = None,
    ):
        self.quantization, self.num_experts = quantization, shape.num_experts
        self._library, self._group, self._shape = library, group, shape
        weights = shape.dtype if quantization == "none" else quantization
        layout = (group if quantization == "int4" else 0, 0, 0, 0)
        if (form := shape.form) is not None:
            weights, offset = f"int{form.bits}", offset_kind(form.has_zeros, form.has_minima)
            layout = (form.group, CODINGS.index(form.table), offset, form.lead(shape.columns[0]))
        sizes = (shape.num_experts, shape.hidden_size, shape.num_columns)
        self.compiled = CompiledExperts(None, *sizes, WEIGHTS[weights], *layout)
        self.expert_bytes: int = library.expert_bytes(ctypes.byref(self.compiled))
        """Bytes of one expert, scales included."""
        if data_EB is None:
            data_EB = new_bytes(self.nbytes, device).view(self.num_experts, self.expert_bytes)
        self.data_EB = data_EB
        self.addresses_E = torch.arange(self.num_experts, device="cpu") * self.expert_bytes + data_EB.data_ptr()
        self.compiled.data = self.addresses_E.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.expert_bytes

    def parts(self, ids_TA: torch.Tensor, first: int) -> tuple[tuple[CpuPackedExperts, bool]]:
        return ((self, True),)

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        if self.quantization != "none":
            gate_up_FD, down_DF = readable(gate_up_FD), readable(down_DF)
        global_scales = (
            (choose_global_scale(gate_up_FD), choose_global_scale(down_DF))
            if self.quantization == "int4"
            else (1.0, 1.0)
        )
        self._library.pack_expert(
            ctypes.byref(self.compiled),
            index,
            gate_up_FD.data_ptr(),
            down_DF.data_ptr(),
            *global_scales,
            gate_up_FD.dtype == torch.float32,
            torch.get_num_threads(),
        )

    def pack_codes(self, index: int, gate_up: Codes, down: Codes) -> None:
        self._library.pack_expert_codes(
            ctypes.byref(self.compiled),
            index,
            ctypes.byref(CompiledCodes.convert(gate_up)),
            ctypes.byref(CompiledCodes.convert(down)),
            torch.get_num_threads(),
        )

    def clone(self) -> CpuPackedExperts:
        own = (self._library, self.quantization, self._group, self._shape)
        return CpuPackedExperts(*own, self.data_EB.device, data_EB=self.data_EB.clone())


class CpuExperts:
    """Each method implements the function of equal name; ``family_protocols`` documents the arguments.

    float16 activations are converted to float32; float16 and float32 weights keep their dtype.

    Args:
        library: see ``library.load``.
        kernel: kernel of the products, one of ``library.kernels``.
    """

    dtypes = (torch.bfloat16, torch.float32, torch.float16)

    def __init__(self, library: Library, kernel: str = ""):
        self._library = library
        self._experts = library.find("experts", kernel)

    def calls(self, quantization: str, group: int) -> dict[str, Callable]:
        """Function name → method, for weights in ``quantization``.

        Args:
            group: inputs that share a scale in int4.
        """

        make_experts = partial(CpuPackedExperts, self._library, quantization, group)
        return {"make_experts": make_experts, "experts": self.experts}

    def experts(
        self, x_TD: torch.Tensor, expert_ids_TA: torch.Tensor, weights_TA: torch.Tensor, mlps: ExpertMLPs
    ) -> torch.Tensor:
        dtype, x_TD = x_TD.dtype, readable(x_TD.contiguous())
        expert_ids_TA, weights_TA = expert_ids_TA.contiguous(), weights_TA.contiguous()
        out_TD = torch.empty_like(x_TD)
        multiply = partial(self._multiply, x_TD, expert_ids_TA, weights_TA, mlps, out_TD)
        if isinstance(mlps.packed, CpuPackedExperts):
            multiply()
        else:  # offloaded: a replay must run Python again, as the experts to read depend on the ids
            self._library.run(multiply)
        return out_TD.to(dtype)

    def _multiply(
        self,
        x_TD: torch.Tensor,
        expert_ids_TA: torch.Tensor,
        weights_TA: torch.Tensor,
        mlps: ExpertMLPs,
        out_TD: torch.Tensor,
    ) -> None:
        sums_TD, is_first, biases, gate = None, True, (), mlps.gate
        if gate is not None:
            tensors = gate.gate_EF, gate.up_EF, gate.down_ED
            sizes = gate.gate_EF.shape[1], gate.down_ED.shape[1]
            numbers = gate.alpha, gate.limit, gate.gate_limit, gate.offset
            biases = *numbers, *(tensor.data_ptr() for tensor in tensors), *sizes
        for part, is_last in mlps.packed.parts(expert_ids_TA, mlps.first):
            if is_first and not is_last:
                sums_TD = x_TD.new_empty(len(x_TD), -(-x_TD.shape[1] // PANEL) * PANEL, dtype=torch.float32)
            call = CompiledExpertsCall(
                x_TD.data_ptr(),
                expert_ids_TA.data_ptr(),
                weights_TA.data_ptr(),
                out_TD.data_ptr(),
                None if sums_TD is None else sums_TD.data_ptr(),
                *expert_ids_TA.shape,
                mlps.first,
                is_first,
                is_last,
                x_TD.dtype == torch.float32,
                mlps.gelu,
                *biases,
            )
            self._experts(ctypes.byref(part.compiled), ctypes.byref(call), torch.get_num_threads())
            is_first = False
