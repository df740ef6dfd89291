"""Function registry: (function, device type, dtype) → implementations.

A layer is handed a ``Functions`` in its constructor and calls ``functions.rms_norm(…)``; which implementation that is
was decided when the ``Functions`` was made. ``reference/`` defines what each function means and runs on any device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

from labinfer.errors import UserError
from labinfer.functions.cpu.bfloat16 import CpuFunctions
from labinfer.functions.cpu.sampling import CpuSampling
from labinfer.functions.reference import attention, elementwise, linear, sampling

PACKED = ("linear", "embedding", "pack_weight")
"""Functions that read the same weights in the same order: only together can they be another implementation's."""


@dataclass(frozen=True)
class Functions:
    """One implementation of every function, for one device and number type."""

    embedding: Callable
    linear: Callable
    pack_weight: Callable
    add_rms_norm: Callable
    silu_and_mul: Callable
    rotate_and_write: Callable
    paged_attention: Callable
    argmax: Callable
    sample: Callable


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

    def select(self, device: torch.device, dtype: torch.dtype, wanted: Mapping[str, str] | None = None) -> Functions:
        """One implementation of each function.

        Args:
            wanted: names of implementations by function, where it is not the preferred one.

        Raises:
            UserError: there is no such function or implementation.
        """
        wanted = dict(wanted or {})
        for function, name in wanted.items():
            names = [c.name for c in self.candidates(function, device, dtype)] if function in self._candidates else []
            if name not in names:
                known = ", ".join(names) if names else f"no such function; there are {', '.join(self._candidates)}"
                raise UserError(f"--functions {function}={name}: for {device.type} and {dtype} there is {known}")
        packed = {wanted[function] for function in PACKED if function in wanted}
        if len(packed) > 1:
            raise UserError(f"--functions: {', '.join(PACKED)} read the same packed weights; choose one name for all")
        wanted |= {function: name for function in PACKED for name in packed}
        chosen = {}
        for function in self._candidates:
            by_name = {c.name: c.call for c in self.candidates(function, device, dtype)}
            chosen[function] = by_name[wanted.get(function, next(reversed(by_name)))]
        return Functions(**chosen)


def parse_wanted(given: tuple[str, ...]) -> dict[str, str]:
    """``--functions linear=reference,…``, or one name for all.

    Raises:
        UserError: it does not read as that.
    """
    wanted: dict[str, str] = {}
    for part in given:
        function, _, name = part.partition("=")
        if name:
            wanted[function] = name
        elif part != "auto":
            wanted |= {field.name: part for field in fields(Functions)}
    return wanted


def default_registry(compiled: ctypes.CDLL | None = None) -> FunctionRegistry:
    """A registry with everything this package brings.

    Args:
        compiled: the library of compiled functions, where it could be compiled.
    """
    registry = FunctionRegistry()
    reference = {
        "embedding": linear.embedding,
        "linear": linear.linear,
        "pack_weight": linear.pack_weight,
        "add_rms_norm": elementwise.add_rms_norm,
        "silu_and_mul": elementwise.silu_and_mul,
        "rotate_and_write": attention.rotate_and_write,
        "paged_attention": attention.paged_attention,
        "argmax": sampling.argmax,
        "sample": sampling.sample,
    }
    for name, call in reference.items():
        registry.add(name, Implementation("reference", call))
    if compiled is not None:
        for functions in (CpuFunctions(compiled), CpuSampling(compiled)):
            for name, call in functions.implementations().items():
                registry.add(name, Implementation("cpu", call, devices=("cpu",), dtypes=functions.dtypes))
    return registry
