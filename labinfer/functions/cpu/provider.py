"""Provider of the compiled functions of this folder."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from functools import partial
from pathlib import Path

import torch

from labinfer.functions.cpu import library
from labinfer.functions.cpu.delta_rule import CpuDeltaRule
from labinfer.functions.cpu.expert_cache import ExpertCache
from labinfer.functions.cpu.experts import CpuExperts
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.graph import CpuCapture
from labinfer.functions.cpu.latent import CpuLatent
from labinfer.functions.cpu.loading import CpuLoading
from labinfer.functions.cpu.mamba import CpuMamba
from labinfer.functions.cpu.measure_roofline import measure_roofline
from labinfer.functions.cpu.packed12 import CpuPacked12
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.cpu.routing import CpuRouting
from labinfer.functions.cpu.sampling import CpuSampling
from labinfer.functions.device import Device
from labinfer.functions.graph import Capture
from labinfer.functions.provider import Provider
from labinfer.functions.registry import (
    CACHE_FUNCTIONS,
    EXPERT_FUNCTIONS,
    MATRIX_FUNCTIONS,
    VOCABULARY_GROUP,
    VOCABULARY_INT4,
    FunctionRegistry,
)
from labinfer.functions.roofline_limits import RooflineLimits
from labinfer.native import compiler
from labinfer.native.targets import PORTABLE

logger = logging.getLogger(__name__)

BFLOAT16 = (torch.bfloat16,)
PRODUCTS = ("linear", "gated_linear")
PANEL_FUNCTIONS = (*PRODUCTS, "paged_attention")
"""Functions whose inner loop multiplies panels of a matrix, with the kernels of ``panel.h``."""


class CpuProvider(Provider):
    """C++ functions called through ctypes, compiled ahead of time or at the first run on a machine. On a rank with an accelerator,
    only the sampling function is used, and only if the library is compiled already.

    Args:
        compiled: the library, if it is already loaded.
    """

    device = Device(
        type="cpu",
        collectives="gloo",
        captures=lambda tp_size: True,  # a replay runs collectives in Python
        multiplies=lambda form: True,
    )

    def __init__(self, compiled: library.Library | None = None):
        self._library = compiled
        self._processor: str | None = None
        self._host_library: library.Library | None = None
        """The compiled library on a rank with an accelerator, for sampling on the host."""

    def prepare(self, device: torch.device, on_progress: compiler.OnProgress = lambda done, total: None) -> None:
        if device.type != "cpu":
            with contextlib.suppress(compiler.NoCompiler, OSError):  # compiling takes too long for sampling alone
                self._host_library = library.load(library.build(only_ready=True))
            return
        self._processor = PORTABLE.name if self.is_portable else compiler.processor()
        try:
            target = PORTABLE if self.is_portable else None
            self._library = library.load(library.build(on_progress=on_progress, target=target))
        except (compiler.NoCompiler, OSError) as error:  # OSError: a damaged file, or a home directory mounted noexec
            logger.warning("%s; using the slower torch kernels", error)

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        if self._host_library is not None:
            draws = {"sample": CpuSampling(self._host_library).sample_on_host}
            registry.add_all(draws, name="host", dtypes=CpuSampling.dtypes, autotuned=False)
        if self._library is None:
            return
        quantized = CpuQuantized(self._library)
        if self._library.bytes_kernel is not None:
            self._add_products_in_bytes(registry, self._library.bytes_kernel)
        for dtype in CpuFunctions.dtypes:
            _add(registry, CpuFunctions(self._library, dtype=dtype).calls(), name="cpu", dtypes=(dtype,))
        _add(registry, CpuLatent(self._library).calls(), name="cpu", dtypes=CpuLatent.dtypes)
        packed12 = {"weights": "packed12", "dtypes": CpuPacked12.dtypes}
        _add(registry, CpuPacked12(self._library).calls(), name="cpu-packed12", **packed12)
        _add(registry, {"route": CpuRouting(self._library).route}, name="cpu", dtypes=CpuRouting.dtypes)
        _add(registry, CpuSampling(self._library).calls(), name="cpu", dtypes=CpuSampling.dtypes)
        _add(registry, CpuDeltaRule(self._library).calls(), name="cpu", dtypes=CpuDeltaRule.dtypes)
        _add(registry, CpuMamba(self._library).calls(), name="cpu", dtypes=CpuMamba.dtypes)
        codes = {
            "pack_codes": quantized.pack_codes,
            "linear": quantized.linear,
            "gated_linear": quantized.gated_linear,
            "embedding": quantized.embedding,
        }
        int8 = codes | {"pack_weight": quantized.quantize_int8}
        int4 = codes | {"pack_weight": partial(quantized.quantize_int4, group=group_size)}
        vocabulary = {
            "pack_weight": partial(quantized.quantize_int4, group=VOCABULARY_GROUP),
            "linear": quantized.linear,
            "embedding": quantized.embedding,
        }
        _add(registry, vocabulary, name="cpu", dtypes=CpuQuantized.dtypes, quantization=VOCABULARY_INT4)
        experts = CpuExperts(self._library)
        _add(registry, experts.calls("none", group_size), name="cpu", dtypes=CpuExperts.dtypes)
        for quantization, calls in {"int8": int8, "int4": int4}.items():
            mixture = experts.calls(quantization, group_size)
            _add(registry, calls | mixture, name="cpu", dtypes=CpuQuantized.dtypes, quantization=quantization)
        for kernel in self._library.kernels[1:]:
            self._add_kernel(registry, kernel)

    def _add_kernel(self, registry: FunctionRegistry, kernel: str) -> None:
        """Register the functions that have variants for ``kernel``."""
        name = f"cpu-{kernel}"
        calls = CpuFunctions(self._library, kernel).calls()
        _add(registry, {function: calls[function] for function in PANEL_FUNCTIONS}, name=name, dtypes=BFLOAT16)
        attention = {"latent_attention": CpuLatent(self._library, kernel).latent_attention}
        _add(registry, attention, name=name, dtypes=BFLOAT16)
        calls12 = CpuPacked12(self._library, kernel).calls()
        packed12 = {function: calls12[function] for function in PRODUCTS}
        _add(registry, packed12, name=f"{name}-packed12", weights="packed12", dtypes=CpuPacked12.dtypes)
        experts = {"experts": CpuExperts(self._library, kernel).experts}
        _add(registry, experts, name=name, dtypes=BFLOAT16)
        if kernel != "amx":
            return
        exact = CpuQuantized(self._library, kernel)
        for quantization in ("int8", "int4", VOCABULARY_INT4):
            _add(registry, _products(exact), name=name, dtypes=CpuQuantized.dtypes, quantization=quantization)
        for quantization in ("int8", "int4"):
            _add(registry, experts, name=name, dtypes=CpuExperts.dtypes, quantization=quantization)

    def _add_products_in_bytes(self, registry: FunctionRegistry, kernel: str) -> None:
        """Register products that widen 4- and 5-bit codes to bytes. Registered first: without autotuning the last one is preferred."""
        name = f"cpu-{kernel}-bytes" if kernel else "cpu-bytes"
        in_bytes = CpuQuantized(self._library, kernel, in_bytes=True)
        for quantization in ("int4", VOCABULARY_INT4):
            _add(registry, _products(in_bytes), name=name, dtypes=BFLOAT16, quantization=quantization)

    def fingerprint(self) -> tuple[object, ...]:
        """Processor, or ``PORTABLE`` instead of it, the C library with its exp and log, and the compiled library's file name (which
        identifies its sources and compiler) and kernels, if it is loaded."""
        library = self._library
        compiled = (library.file_name, library.kernels) if library is not None else (None,)
        return self._processor, compiler.c_library(), *compiled

    def roofline_limits(self) -> RooflineLimits | None:
        return measure_roofline(self._library) if self._library is not None else None

    def compiled(self) -> ctypes.CDLL | None:
        return self._library.compiled if self._library is not None else None

    def capture(self) -> Capture | None:
        return CpuCapture(self._library) if self._library is not None else None

    def expert_offload(self, num_bytes: int, folder: Path) -> ExpertCache | None:
        return ExpertCache(self._library, num_bytes, folder) if self._library is not None else None

    def loading(self) -> CpuLoading | None:
        return CpuLoading(self._library) if self._library is not None else None


def _products(quantized: CpuQuantized) -> dict:
    return {"linear": quantized.linear, "gated_linear": quantized.gated_linear}


def _add(registry: FunctionRegistry, calls: dict, **description) -> None:
    for function, call in calls.items():
        layout = "panels" if function in (*MATRIX_FUNCTIONS, *EXPERT_FUNCTIONS) else "plain"
        if description.get("weights") == "packed12":
            layout = "packed12"
        if function in CACHE_FUNCTIONS:
            layout = "tiles"
        registry.add_all({function: call}, devices=("cpu",), layout=layout, **description)
