"""``drop_with_layout``: removes an implementation that failed, and all others of its weight layout if no other can replace it."""

from __future__ import annotations

from labinfer.functions.registry import REQUIRED_BY_LAYOUT, FunctionRegistry, Implementation, layout_group


def drop_with_layout(registry: FunctionRegistry, function: str, name: str, quantization: str) -> list[tuple[str, str]]:
    """Remove the implementation ``name`` of ``function`` for weights in ``quantization`` from ``registry``. If its weight layout then
    lacks ``function``, every implementation of that layout and quantization is removed, so that no weights are packed in it.

    Returns:
        Function and name of each removed implementation, the given one first; empty if ``registry`` has no such implementation.
    """
    gone = [
        item for item in registry.all_candidates(function) if (item.name, item.quantization) == (name, quantization)
    ]
    registry.drop(function, name, quantization)
    removed = {(function, name): None} if gone else {}
    for item in gone if function in (*REQUIRED_BY_LAYOUT, "pack_codes") else ():
        if any(_replaces(other, item) for other in registry.all_candidates(function)):
            continue
        for other in layout_group(function):
            for each in registry.all_candidates(other):
                if (each.layout, each.quantization) == (item.layout, quantization):
                    registry.drop(other, each.name, quantization)
                    removed[other, each.name] = None
    return list(removed)


def _replaces(item: Implementation, gone: Implementation) -> bool:
    """Whether ``item`` supports every device, dtype and weight layout that the removed implementation ``gone`` supported."""
    devices = not item.devices or bool(gone.devices) and set(gone.devices) <= set(item.devices)
    dtypes = not item.dtypes or bool(gone.dtypes) and set(gone.dtypes) <= set(item.dtypes)
    return devices and dtypes and (item.layout, item.quantization) == (gone.layout, gone.quantization)
