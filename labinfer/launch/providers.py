"""Function providers of this process, and registries of their implementations."""

from __future__ import annotations

from collections.abc import Iterable

from labinfer.base.plugins import PLUGINS
from labinfer.base.registry import REGISTRY
from labinfer.functions.device import Device
from labinfer.functions.provider import Provider
from labinfer.functions.registry import FUNCTIONS, FunctionRegistry, WeightChoice

GROUP_SIZE = 64


def make_providers() -> list[Provider]:
    """Built-in providers, then those of plugins. Implementations of later providers are preferred."""
    providers = []
    for name in REGISTRY.names("function_provider"):
        with PLUGINS.blame(REGISTRY.entry("function_provider", name).origin):
            providers.append(REGISTRY.find("function_provider", name)())
    return providers


def describe_device(device_type: str) -> Device:
    """Description of a device type by the last registered provider that has one; a ``Device`` with defaults if none has."""
    described = [provider.device for provider in REGISTRY.parts("function_provider").values() if provider.device]
    return next((device for device in reversed(described) if device.type == device_type), Device(type=device_type))


def collectives_backend(device_type: str) -> str:
    """Backend of torch.distributed between devices of a type; empty if tensors must go through host memory.

    A rank whose torch does not know the type may return an empty name. It is no member of such a group.
    """
    if device_type == "cpu":
        return ""
    from labinfer.comm.torch_dist import registered_backend

    return describe_device(device_type).collectives or registered_backend(device_type)


def origin(provider: Provider) -> str:
    """Plugin that a provider comes from; empty for a built-in one."""
    entries = REGISTRY.plugged_in("function_provider").values()
    return next((entry.origin for entry in entries if entry.part is type(provider)), "")


def make_registry(
    providers: Iterable[Provider], group_size: int = GROUP_SIZE, weights: WeightChoice = "auto"
) -> FunctionRegistry:
    """Registry of all implementations of ``providers``.

    Args:
        group_size: group size of int4: inputs that share a scale.
        weights: see ``FunctionRegistry``.

    Raises:
        UserError: a plugin's provider raises, or registers a name that is taken.
    """
    registry = FunctionRegistry(weights)
    for provider in providers:
        registry.plugin = origin(provider)
        with PLUGINS.blame(registry.plugin):
            provider.register(registry, group_size)
    return registry


def reference_registry(group_size: int = GROUP_SIZE, weights: WeightChoice = "auto") -> FunctionRegistry:
    """Registry of the reference implementation only, which runs on any device, including meta."""
    return make_registry([REGISTRY.find("function_provider", "reference")()], group_size, weights)


def parse_overrides(given: tuple[str, ...]) -> dict[str, str]:
    """Parse ``--functions linear=reference,…``, or one name for all functions."""
    overrides: dict[str, str] = {}
    for part in given:
        function, _, name = part.partition("=")
        if name:
            overrides[function] = name
        elif part != "auto":
            overrides |= dict.fromkeys(FUNCTIONS, part)
    return overrides
