"""``CudaProvider``: registers the Triton kernels and CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial, wraps

import torch

from labinfer.base.errors import first_line
from labinfer.functions.cuda.graph import CudaCapture
from labinfer.functions.cuda.nvml import driver_version, open_energy_counter
from labinfer.functions.device import Device
from labinfer.functions.graph import Capture
from labinfer.functions.provider import Provider
from labinfer.functions.reference import linear, quantized
from labinfer.functions.registry import VOCABULARY_INT4, FunctionRegistry
from labinfer.functions.stacked_experts import StackedExperts
from labinfer.native.compiler import OnProgress
from labinfer.weights.codes import QuantLayout

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def multiplies(form: QuantLayout) -> bool:
    """Whether ``products`` multiplies weights in ``form`` without dequantizing them: codes of 4 and 8 bits in groups of at least 32
    inputs, or of 8 bits with one scale per output. ``products.can_multiply`` does the same check for a packed weight."""
    return form.bits in (4, 8) and (form.group >= 32 or form.bits == 8 and not form.group)


class CudaProvider(Provider):
    """Provider of the Triton kernels (CUDA builds of torch install Triton), and of CUDA graphs for steps."""

    # torch's builds for AMD and MetaX have these names, too
    device = Device(
        type="cuda",
        collectives="nccl",
        captures=lambda tp_size: tp_size == 1,
        multiplies=multiplies,
        open_energy_counter=open_energy_counter,
    )

    def __init__(self):
        self._device: torch.device | None = None
        self._fingerprint: tuple[object, ...] = ()
        self._capture: CudaCapture | None = None

    def prepare(self, device: torch.device, on_progress: OnProgress = lambda done, total: None) -> None:
        if device.type != "cuda":
            return
        try:
            # imported here because Triton is not installed everywhere, and takes a second to import
            import triton

            from labinfer.functions.cuda import elementwise

            with torch.cuda.device(device):
                elementwise.silu_and_mul(torch.ones(1, 2, device=device)).tolist()
        except Exception as error:  # noqa: BLE001 - Triton, its compilers and the driver raise errors of their own
            logger.warning("Triton kernels do not work here: %s; using the slower torch kernels", first_line(error))
            return
        self._device, self._capture = device, CudaCapture(device)
        builds = (triton.__version__, torch.version.cuda, torch.version.hip)
        self._fingerprint = (*builds, driver_version(), torch.cuda.get_device_name(device))

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        if self._device is None:
            return
        from labinfer.functions.cuda import (
            attention,
            delta_rule,
            elementwise,
            experts,
            latent,
            mamba,
            products,
            sampling,
        )

        calls = {
            "add_rms_norm": elementwise.add_rms_norm,
            "silu_and_mul": elementwise.silu_and_mul,
            "gelu_and_mul": elementwise.gelu_and_mul,
            "rotate_and_write": elementwise.rotate_and_write,
            "paged_attention": attention.paged_attention,
            "latent_attention": latent.latent_attention,
            "causal_conv": delta_rule.causal_conv,
            "delta_rule": delta_rule.delta_rule,
            "selective_scan": mamba.selective_scan,
        }
        kernels = {"name": "triton", "devices": ("cuda",), "dtypes": DTYPES}

        def add_all(calls: Mapping[str, Callable], **description) -> None:
            on_card = calls if torch.cuda.device_count() == 1 else {f: self._on_card(call) for f, call in calls.items()}
            registry.add_all(on_card, **description)

        add_all(calls, **kernels)
        multiplier = products.CudaProducts(self._device)
        matrices = {
            "none": (linear.pack_weight, linear.linear, None),
            "int8": (quantized.quantize_int8, quantized.linear, quantized.pack_codes),
            "int4": (partial(quantized.quantize_int4, group=group_size), quantized.linear, quantized.pack_codes),
        }
        for quantization, of_matrices in matrices.items():
            make = partial(StackedExperts, *of_matrices)
            mixture = {"make_experts": make, "experts": partial(experts.experts, multiplier)}
            add_all(mixture, quantization=quantization, layout="stacks", **kernels)
        for quantization in ("int8", "int4", VOCABULARY_INT4):
            add_all({"linear": multiplier.linear}, quantization=quantization, **kernels)
        registry.add_all({"sample": sampling.sample}, name="rows", devices=("cuda",), autotuned=False)

    def _on_card(self, function: Callable) -> Callable:
        """Wrap ``function`` to run on this provider's GPU: Triton launches kernels on the thread's current device, wherever their tensors are."""

        @wraps(function)
        def call(*arguments, **named):
            with torch.cuda.device(self._device):
                return function(*arguments, **named)

        return call

    def fingerprint(self) -> tuple[object, ...]:
        return self._fingerprint

    def capture(self) -> Capture | None:
        return self._capture
