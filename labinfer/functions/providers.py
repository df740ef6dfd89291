"""The table of providers, and registries of what they bring."""

from __future__ import annotations

from collections.abc import Iterable

from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.cuda.provider import CudaProvider
from labinfer.functions.provider import Provider
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.registry import FunctionRegistry, WeightChoice

PROVIDERS: tuple[type[Provider], ...] = (ReferenceProvider, CpuProvider, CudaProvider)
"""Implementations of later ones are preferred."""
GROUP_SIZE = 64


def make_providers() -> list[Provider]:
    return [provider() for provider in PROVIDERS]


def make_registry(
    providers: Iterable[Provider], group_size: int = GROUP_SIZE, weights: WeightChoice = "auto"
) -> FunctionRegistry:
    """Everything that these providers have ready.

    Args:
        group_size: inputs that share a scale in int4.
        weights: see ``FunctionRegistry``.
    """
    registry = FunctionRegistry(weights)
    for provider in providers:
        provider.register(registry, group_size)
    return registry


def reference_registry(group_size: int = GROUP_SIZE, weights: WeightChoice = "auto") -> FunctionRegistry:
    """The reference alone, which runs on any device, also on the meta device."""
    return make_registry([ReferenceProvider()], group_size, weights)
