"""The providers of this process, and registries of what they bring."""

from __future__ import annotations

from collections.abc import Iterable

from labinfer.base.plugins import PLUGINS
from labinfer.base.registry import REGISTRY
from labinfer.functions.provider import Provider
from labinfer.functions.registry import FunctionRegistry, WeightChoice

GROUP_SIZE = 64


def make_providers() -> list[Provider]:
    """Providers that ship, then those of plugins. Implementations of later ones are preferred."""
    providers = []
    for name in REGISTRY.names("function_provider"):
        with PLUGINS.blame(REGISTRY.entry("function_provider", name).origin):
            providers.append(REGISTRY.find("function_provider", name)())
    return providers


def origin(provider: Provider) -> str:
    """The plugin that a provider comes from; empty for one that ships."""
    entries = REGISTRY.plugged_in("function_provider").values()
    return next((entry.origin for entry in entries if entry.part is type(provider)), "")


def make_registry(
    providers: Iterable[Provider], group_size: int = GROUP_SIZE, weights: WeightChoice = "auto"
) -> FunctionRegistry:
    """Everything that these providers have ready.

    Args:
        group_size: inputs that share a scale in int4.
        weights: see ``FunctionRegistry``.

    Raises:
        UserError: a plugin's provider raises, or takes a name that another one has.
    """
    registry = FunctionRegistry(weights)
    for provider in providers:
        registry.plugin = origin(provider)
        with PLUGINS.blame(registry.plugin):
            provider.register(registry, group_size)
    return registry


def reference_registry(group_size: int = GROUP_SIZE, weights: WeightChoice = "auto") -> FunctionRegistry:
    """The reference alone, which runs on any device, also on the meta device."""
    return make_registry([REGISTRY.find("function_provider", "reference")()], group_size, weights)
