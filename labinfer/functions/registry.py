"""Function registry: (function, device type, dtype) → implementations.

A layer is handed a ``Functions`` in its constructor and calls ``functions.rms_norm(…)``; which implementation that is
was decided when the ``Functions`` was made. ``reference/`` defines what each function means and runs on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from labinfer.functions.reference import attention, elementwise, linear


@dataclass(frozen=True)
class Functions:
    """One implementation of every function, for one device and number type."""

    embedding: Callable
    linear: Callable
    rms_norm: Callable
    silu_and_mul: Callable
    rotary: Callable
    write_kv: Callable
    paged_attention: Callable


@dataclass(frozen=True)
class Implementation:
    """A candidate for a function."""

    name: str
    call: Callable
    devices: tuple[str, ...] = ()
    """Device types it runs on; empty for all."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Number types it takes; empty for all."""

    def suits(self, device: torch.device, dtype: torch.dtype) -> bool:
        return (not self.devices or device.type in self.devices) and (not self.dtypes or dtype in self.dtypes)


class FunctionRegistry:
    """The candidates for each function; later ones are preferred."""

    def __init__(self) -> None:
        self._candidates: dict[str, list[Implementation]] = {f.name: [] for f in fields(Functions)}

    def add(self, function: str, implementation: Implementation) -> None:
        if function not in self._candidates:
            raise KeyError(f"no function {function!r}; there are {', '.join(self._candidates)}")
        self._candidates[function].append(implementation)

    def candidates(self, function: str, device: torch.device, dtype: torch.dtype) -> list[Implementation]:
        return [candidate for candidate in self._candidates[function] if candidate.suits(device, dtype)]

    def select(self, device: torch.device, dtype: torch.dtype) -> Functions:
        return Functions(**{name: self.candidates(name, device, dtype)[-1].call for name in self._candidates})


def default_registry() -> FunctionRegistry:
    """A registry with everything this package brings."""
    registry = FunctionRegistry()
    reference = {
        "embedding": linear.embedding,
        "linear": linear.linear,
        "rms_norm": elementwise.rms_norm,
        "silu_and_mul": elementwise.silu_and_mul,
        "rotary": elementwise.rotary,
        "write_kv": attention.write_kv,
        "paged_attention": attention.paged_attention,
    }
    for name, call in reference.items():
        registry.add(name, Implementation("reference", call))
    return registry
