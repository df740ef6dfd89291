"""Reference provider of the core's functions, on any device. ``provider.py`` adds functions of further layers and of quantized weights."""

from __future__ import annotations

import torch

from labinfer.functions.provider import Provider
from labinfer.functions.reference import attention, elementwise, linear, sampling
from labinfer.functions.registry import FunctionRegistry

DENSE = {"pack_weight": linear.pack_weight, "linear": linear.linear, "embedding": linear.embedding}


class PlainReferenceProvider(Provider):
    """Plain torch. Only products with dense weights are autotuned, for which torch uses the vendor's library."""

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        others = {
            "add_rms_norm": elementwise.add_rms_norm,
            "silu_and_mul": elementwise.silu_and_mul,
            "gelu_and_mul": elementwise.gelu_and_mul,
            "rotate_and_write": attention.rotate_and_write,
            "paged_attention": attention.paged_attention,
            "argmax": sampling.argmax,
            "sample": sampling.sample,
        }
        registry.add_all(DENSE, name="reference")
        registry.add_all(others, name="reference", autotuned=False)

    def fingerprint(self) -> tuple[object, ...]:
        return torch.__version__, torch.get_num_threads()
