"""Function registry: (function, device type, dtype, how weights are held) → implementations.

A layer is handed a ``Functions`` in its constructor and calls ``functions.add_rms_norm(…)``; which implementation that is
was decided when the ``Functions`` was made. ``reference/`` defines what each function means and runs on any device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial

import torch

from labinfer.errors import UserError
from labinfer.functions.cpu.bfloat16 import CpuFunctions
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.cpu.sampling import CpuSampling
from labinfer.functions.reference import attention, elementwise, linear, quantized, sampling


@dataclass(frozen=True)
class MatrixFunctions:
    """A way to hold matrices of weights, and the products with them. All are of one layout: they share what is packed."""

    pack_weight: Callable
    linear: Callable
    embedding: Callable | None
    """None where tables are not held this way."""


@dataclass(frozen=True)
class Functions:
    """One implementation of every function, for one device and number type."""

    layers: MatrixFunctions
    """For the matrices of the layers."""
    vocabulary: MatrixFunctions
    """For the embedding and the head."""
    add_rms_norm: Callable
    silu_and_mul: Callable
    rotate_and_write: Callable
    paged_attention: Callable
    argmax: Callable
    sample: Callable


OF_MATRICES = tuple(field.name for field in fields(MatrixFunctions))
FUNCTIONS = (*OF_MATRICES, *(field.name for field in fields(Functions) if field.type != MatrixFunctions.__name__))


@dataclass(frozen=True)
class Implementation:
    """A candidate for a function."""

    name: str
    call: Callable
    devices: tuple[str, ...] = ()
    """Device types it runs on; empty for all."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Number types of activations it takes; empty for all."""
    quantization: str = "none"
    """How it holds weights, if it is a function of matrices."""

    def suits(self, device: torch.device, dtype: torch.dtype) -> bool:
        return (not self.devices or device.type in self.devices) and (not self.dtypes or dtype in self.dtypes)


class FunctionRegistry:
    """The candidates for each function; later ones are preferred."""

    def __init__(self) -> None:
        self._candidates: dict[str, list[Implementation]] = {name: [] for name in FUNCTIONS}

    def add(self, function: str, implementation: Implementation) -> None:
        if function not in self._candidates:
            raise KeyError(f"no function {function!r}; there are {', '.join(self._candidates)}")
        self._candidates[function].append(implementation)

    def candidates(
        self, function: str, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> dict[str, Callable]:
        """By name."""
        return {
            candidate.name: candidate.call
            for candidate in self._candidates[function]
            if candidate.suits(device, dtype) and candidate.quantization == quantization
        }

    def select(
        self,
        device: torch.device,
        dtype: torch.dtype,
        wanted: Mapping[str, str] | None = None,
        quantization: str = "none",
    ) -> Functions:
        """One implementation of each function.

        Args:
            wanted: names of implementations by function, where it is not the preferred one.
            quantization: how the layers' matrices are held; those of the vocabulary are held in 8 bits at least.

        Raises:
            UserError: there is no such function or implementation.
        """
        wanted = dict(wanted or {})
        vocabulary = "none" if quantization == "none" else "int8"
        for function, name in wanted.items():
            if function not in self._candidates:
                known = ", ".join(FUNCTIONS)
                raise UserError(f"--functions {function}={name}: there is no such function; there are {known}")
            for held in {quantization, vocabulary} if function in OF_MATRICES else {"none"}:
                known = self.candidates(function, device, dtype, held)
                if known and name not in known:
                    weights = "" if held == "none" else f" and {held} weights"
                    raise UserError(
                        f"--functions {function}={name}: for {device.type} and {dtype}{weights} there is {', '.join(known)}"
                    )
        packed = {wanted[function] for function in OF_MATRICES if function in wanted}
        if len(packed) > 1:
            raise UserError(
                f"--functions: {', '.join(OF_MATRICES)} read the same packed weights; choose one name for all"
            )
        wanted |= {function: name for function in OF_MATRICES for name in packed}

        def chosen(function: str, quantization: str = "none") -> Callable | None:
            by_name = self.candidates(function, device, dtype, quantization)
            return by_name[wanted.get(function, next(reversed(by_name)))] if by_name else None

        def of_matrices(quantization: str) -> MatrixFunctions:
            return MatrixFunctions(**{function: chosen(function, quantization) for function in OF_MATRICES})

        others = {function: chosen(function) for function in FUNCTIONS if function not in OF_MATRICES}
        return Functions(layers=of_matrices(quantization), vocabulary=of_matrices(vocabulary), **others)


def parse_wanted(given: tuple[str, ...]) -> dict[str, str]:
    """``--functions linear=reference,…``, or one name for all."""
    wanted: dict[str, str] = {}
    for part in given:
        function, _, name = part.partition("=")
        if name:
            wanted[function] = name
        elif part != "auto":
            wanted |= dict.fromkeys(FUNCTIONS, part)
    return wanted


def default_registry(library: ctypes.CDLL | None = None, group: int = 64) -> FunctionRegistry:
    """A registry with everything this package brings.

    Args:
        library: the compiled functions, where they could be compiled.
        group: inputs that share a scale in int4.
    """
    registry = FunctionRegistry()
    reference = {
        "pack_weight": linear.pack_weight,
        "linear": linear.linear,
        "embedding": linear.embedding,
        "add_rms_norm": elementwise.add_rms_norm,
        "silu_and_mul": elementwise.silu_and_mul,
        "rotate_and_write": attention.rotate_and_write,
        "paged_attention": attention.paged_attention,
        "argmax": sampling.argmax,
        "sample": sampling.sample,
    }
    for name, call in reference.items():
        registry.add(name, Implementation("reference", call))
    int8 = (quantized.quantize_int8, quantized.linear, quantized.embedding)
    int4 = (partial(quantized.quantize_int4, group=group), quantized.linear)
    for quantization, calls in {"int8": int8, "int4": int4}.items():
        for name, call in zip(OF_MATRICES, calls, strict=False):
            registry.add(name, Implementation("reference", call, quantization=quantization))
    if library is not None:
        for functions in (CpuFunctions(library), CpuSampling(library)):
            for name, call in functions.implementations().items():
                registry.add(name, Implementation("cpu", call, ("cpu",), functions.dtypes))
        for quantization, calls in CpuQuantized(library).implementations(group).items():
            for name, call in zip(OF_MATRICES, calls, strict=False):
                registry.add(name, Implementation("cpu", call, ("cpu",), CpuQuantized.dtypes, quantization))
    return registry
