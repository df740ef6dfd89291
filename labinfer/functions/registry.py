"""Function registry: (function, device type, dtype, how weights are held) → implementations.

A layer is handed a ``Functions`` in its constructor and calls ``functions.add_rms_norm(…)``; which implementation that is
was decided when the ``Functions`` was made, where need be for each class of rows. ``reference/`` defines what each function
means and runs on any device. ``docs/add-a-function.md`` shows how to add one.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from labinfer.errors import UserError
from labinfer.functions.cpu.bfloat16 import WITH_PANELS, CpuFunctions, has_dot
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
OTHERS = tuple(field.name for field in fields(Functions) if field.type != MatrixFunctions.__name__)
FUNCTIONS = (*OF_MATRICES, *OTHERS)

ROW_CLASSES = (1, 8, 32, 128)
"""The most rows (tokens) of each class of batch sizes but the last: one request, a few, many, small prompts, prompts."""
LAYERS_LINEAR, VOCABULARY_LINEAR = "layers.linear", "vocabulary.linear"
"""What ``Choice`` calls the two users of ``linear``."""

Choice = Mapping[str, Sequence[str]]
"""Names of implementations, one for each class of rows, by function; ``linear`` as above."""


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
    layout: str = "plain"
    """The order in which it holds or reads them: implementations of one layout can take turns."""
    competes: bool = True
    """False for one that only says what is meant: it is taken by name, or where there is no other, but never measured."""

    def suits(self, device: torch.device, dtype: torch.dtype) -> bool:
        return (not self.devices or device.type in self.devices) and (not self.dtypes or dtype in self.dtypes)


class ByRows:
    """A function that is another one for each class of rows of its first argument.

    Args:
        calls: one for each class, see ``ROW_CLASSES``.
    """

    def __init__(self, calls: Sequence[Callable]):
        self._calls = tuple(calls)

    def __call__(self, first: torch.Tensor, *others):
        return self._calls[bisect_left(ROW_CLASSES, first.shape[0])](first, *others)


class FunctionRegistry:
    """The candidates for each function; later ones are preferred."""

    def __init__(self) -> None:
        self._candidates: dict[str, list[Implementation]] = {name: [] for name in FUNCTIONS}

    def add(self, function: str, implementation: Implementation) -> None:
        if function not in self._candidates:
            raise KeyError(f"no function {function!r}; there are {', '.join(self._candidates)}")
        self._candidates[function].append(implementation)

    def candidates(
        self,
        function: str,
        device: torch.device,
        dtype: torch.dtype,
        wanted: Mapping[str, str] | None = None,
        quantization: str = "none",
    ) -> dict[str, Implementation]:
        """By name, those that ``wanted`` leaves.

        Args:
            wanted: as for ``select``, which refuses names that there are not.
        """
        wanted = wanted or {}

        def suiting(function: str) -> dict[str, Implementation]:
            found = (one for one in self._candidates[function] if one.suits(device, dtype))
            return {one.name: one for one in found if one.quantization == quantization}

        found = suiting(function)
        if function in OF_MATRICES:
            by_function = {other: suiting(other) for other in OF_MATRICES if other in wanted}
            layouts = {known[wanted[other]].layout for other, known in by_function.items() if known}
            found = {name: one for name, one in found.items() if {one.layout} >= layouts}
        return {name: one for name, one in found.items() if wanted.get(function, name) == name}

    def select(
        self,
        device: torch.device,
        dtype: torch.dtype,
        wanted: Mapping[str, str] | None = None,
        quantization: str = "none",
        choice: Choice | None = None,
    ) -> Functions:
        """One implementation of each function, or one for each class of rows.

        Args:
            wanted: names of implementations by function, where neither the choice nor the preferred one is to be taken.
            quantization: how the layers' matrices are held; those of the vocabulary are held in 8 bits at least.
            choice: what was measured to be fastest; the preferred one where it says nothing.

        Raises:
            UserError: there is no such function or implementation, or they read weights in different layouts.
        """
        wanted, choice = wanted or {}, choice or {}
        self.check(device, dtype, wanted, quantization)

        def chosen(known: Mapping[str, Implementation], names: Sequence[str] = ()) -> Callable | None:
            if not known:
                return None
            preferred = known[next(reversed(known))]
            calls = [known.get(name, preferred).call for name in names] or [preferred.call]
            return calls[0] if len(set(map(id, calls))) == 1 else ByRows(calls)

        def of_matrices(quantization: str, names: Sequence[str] = ()) -> MatrixFunctions:
            known = {name: self.candidates(name, device, dtype, wanted, quantization) for name in OF_MATRICES}
            layout = next(
                known["linear"][name] for name in (*names, *reversed(known["linear"])) if name in known["linear"]
            ).layout
            for name, found in known.items():
                known[name] = {other: one for other, one in found.items() if one.layout == layout}
            return MatrixFunctions(
                **{name: chosen(found, names if name == "linear" else ()) for name, found in known.items()}
            )

        others = {name: chosen(self.candidates(name, device, dtype, wanted), choice.get(name, ())) for name in OTHERS}
        return Functions(
            layers=of_matrices(quantization, choice.get(LAYERS_LINEAR, ())),
            vocabulary=of_matrices(vocabulary_quantization(quantization), choice.get(VOCABULARY_LINEAR, ())),
            **others,
        )

    def check(self, device: torch.device, dtype: torch.dtype, wanted: Mapping[str, str], quantization: str) -> None:
        """Refuse names that there are not, and names of matrices' functions that do not go together.

        Raises:
            UserError: see ``select``.
        """
        held = (quantization, vocabulary_quantization(quantization))
        for function, name in wanted.items():
            if function not in self._candidates:
                known = ", ".join(FUNCTIONS)
                raise UserError(f"--functions {function}={name}: there is no such function; there are {known}")
        for quantization in dict.fromkeys(held):
            layouts = set()
            for function, name in wanted.items():
                matrices = function in OF_MATRICES
                known = self.candidates(function, device, dtype, {}, quantization if matrices else "none")
                if known and name not in known:
                    weights = f" and {quantization} weights" if matrices and quantization != "none" else ""
                    raise UserError(
                        f"--functions {function}={name}: for {device.type} and {dtype}{weights} there is {', '.join(known)}"
                    )
                layouts |= {known[name].layout} if known and matrices else set()
            if len(layouts) > 1:
                raise UserError(
                    f"--functions: {', '.join(OF_MATRICES)} read the same packed weights; choose names that go together"
                )


def vocabulary_quantization(quantization: str) -> str:
    """How the matrices of the vocabulary are held where those of the layers are held in ``quantization``."""
    return "none" if quantization == "none" else "int8"


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
            registry.add(name, Implementation("reference", call, quantization=quantization, competes=False))
    if library is not None:
        for name, call in CpuFunctions(library).implementations().items():
            layout = "panels" if name in OF_MATRICES else "plain"
            registry.add(name, Implementation("cpu", call, ("cpu",), CpuFunctions.dtypes, layout=layout))
        if has_dot(library):
            implementations = CpuFunctions(library, dot=True).implementations()
            for name in WITH_PANELS:
                layout, call = "panels" if name in OF_MATRICES else "plain", implementations[name]
                registry.add(name, Implementation("cpu-dot", call, ("cpu",), CpuFunctions.dtypes, layout=layout))
        for name, call in CpuSampling(library).implementations().items():
            registry.add(name, Implementation("cpu", call, ("cpu",), CpuSampling.dtypes))
        for quantization, calls in CpuQuantized(library).implementations(group).items():
            for name, call in zip(OF_MATRICES, calls, strict=False):
                registry.add(name, Implementation("cpu", call, ("cpu",), CpuQuantized.dtypes, quantization, "panels"))
    return registry
