"""``NpuProvider``: registers the operators of torch_npu (Ascend NPUs) and NPU graphs."""

from __future__ import annotations

import logging
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from labinfer.base.errors import first_line
from labinfer.functions.device import Device
from labinfer.functions.graph import Capture
from labinfer.functions.provider import Provider
from labinfer.functions.reference import linear, quantized
from labinfer.functions.registry import VOCABULARY_GROUP, VOCABULARY_INT4, FunctionRegistry
from labinfer.functions.stacked_experts import StackedExperts
from labinfer.native.compiler import OnProgress
from labinfer.weights.codes import QuantLayout

if TYPE_CHECKING:
    from labinfer.functions.npu.attention import NpuAttention

logger = logging.getLogger(__name__)


def multiplies(form: QuantLayout) -> bool:
    """Whether NPUs multiply by a checkpoint's quantized weights in ``form`` as they are stored, without dequantizing them."""
    # ranks without an NPU read the description of the device, and need the operators' modules only for such checkpoints
    from labinfer.functions.npu import products

    return products.multiplies(form)


class NpuProvider(Provider):
    """Provider of torch_npu's operators and of captured steps.

    Args:
        ops: module of the operators, which then may be on any device; None for torch_npu on NPUs.
    """

    device = Device(
        type="npu",
        collectives="hccl",
        block_size=128,  # the smallest block size with which the attention operator supports prompts
        captures=lambda tp_size: tp_size == 1,
        multiplies=multiplies,
    )

    def __init__(self, ops: ModuleType | None = None):
        self._ops = ops
        self._device: torch.device | None = None
        self._attention: NpuAttention | None = None
        self._fingerprint: tuple[object, ...] = ()

    def prepare(self, device: torch.device, on_progress: OnProgress = lambda done, total: None) -> None:
        if self._ops is None and device.type != "npu":
            return
        from labinfer.functions.npu.attention import NpuAttention

        try:
            if self._ops is None:
                import torch_npu  # imported only on NPUs: other machines lack the package

                self._ops = torch_npu
            self._attention = NpuAttention(self._ops, device)
            npu = self._ops.npu
            versions = (npu.utils.get_cann_version(module) for module in ("CANN", "DRIVER"))
            self._fingerprint = (self._ops.__version__, *versions, npu.get_device_name(device))
        except Exception as error:  # noqa: BLE001 - the vendor's libraries and the card raise errors of their own
            self._attention = None
            logger.warning("torch_npu does not work here: %s; using the slower torch functions", first_line(error))
            return
        self._device = device

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        if self._device is None:
            return
        from labinfer.functions.npu import elementwise, experts, products, route

        ops, npu = self._ops, {"name": "npu", "devices": ("npu",)}
        all_dtypes = (*elementwise.HALF_DTYPES, torch.float32)
        own = elementwise.NpuElementwise(ops)
        calls = {
            "add_rms_norm": own.add_rms_norm,
            "silu_and_mul": own.silu_and_mul,
            "rotate_and_write": own.rotate_and_write,
            "route": partial(route.route, ops),
        }
        registry.add_all(calls, dtypes=all_dtypes, **npu)
        half = npu | {"dtypes": elementwise.HALF_DTYPES}
        registry.add_all({"paged_attention": self._attention}, **half)
        int8_linear = partial(products.int8_linear, ops)
        registry.add_all({"linear": int8_linear}, quantization="int8", **half)
        int4_linear = partial(products.int4_linear, ops)
        pack = partial(products.quantize_int4, group=group_size)
        vocabulary = {
            "pack_weight": partial(products.quantize_int4, group=VOCABULARY_GROUP),
            "linear": int4_linear,
            "embedding": products.embedding,
        }
        int4 = vocabulary | {"pack_weight": pack, "pack_codes": products.pack_codes}
        registry.add_all(int4, quantization="int4", layout="words", **half)
        registry.add_all(vocabulary, quantization=VOCABULARY_INT4, layout="words", **half)
        multiply = partial(experts.experts, ops)
        matrices = {
            "none": (linear.pack_weight, linear.linear, None),
            "int8": (quantized.quantize_int8, int8_linear, quantized.pack_codes),
            "int4": (pack, int4_linear, products.pack_codes),
        }
        for quantization, of_matrices in matrices.items():
            mixture = {"make_experts": partial(StackedExperts, *of_matrices), "experts": multiply}
            dtypes = all_dtypes if quantization == "none" else elementwise.HALF_DTYPES
            registry.add_all(mixture, quantization=quantization, layout="stacks", **npu | {"dtypes": dtypes})

    def fingerprint(self) -> tuple[object, ...]:
        return self._fingerprint

    def capture(self) -> Capture | None:
        if self._device is None:
            return None
        from labinfer.functions.npu.graph import NpuCapture

        return NpuCapture(self._ops.npu, self._attention, self._device)
