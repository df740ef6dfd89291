"""``PackedWeight``: a weight matrix as ``pack_weight`` returns it and ``linear`` and ``embedding`` read it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the 16 E2M1 codes (4-bit floats) times 2, which are integers (OCP Microscaling Formats 1.0, 5.3.3)."""
TABLES = {
    "": (),
    "e2m1": E2M1,
    "nvfp4": E2M1,
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""Code tables of 4-bit formats: twice the values of MXFP4 (OCP Microscaling Formats 1.0, 5.3.3), with powers of two as scales;
those of NVFP4, with other scales; and the values of IQ4_NL and IQ4_XS (ggml-org/llama.cpp, ggml/src/ggml-common.h). Compiled functions
refer to a table by its index here."""
POWERS_OF_TWO = ("e2m1",)
"""Tables with power-of-two scales."""
PACKAGE = __name__.rpartition(".")[0] + "."
Weight = TypeVar("Weight")


class PackedWeight(Protocol):
    """A matrix (outputs, inputs) in the weight layout of one implementation. Further fields are private to that implementation."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the original matrix, and of rows that ``embedding`` returns."""

    @property
    def exact_dtype(self) -> torch.dtype:
        """Dtype of activations for which the product with a unit vector returns a column without further rounding."""

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """Size in bytes, scales included."""

    def clone(self) -> PackedWeight:
        """A copy with memory of its own for the weights."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix in its own dtype; the implementation defines the order of ``data``."""

    data: torch.Tensor
    outputs: int
    inputs: int

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    exact_dtype = dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def clone(self) -> DenseWeight:
        return clone_tensors(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A quantized matrix; the implementation defines the order of ``data`` and ``scales``."""

    data: torch.Tensor
    scales: torch.Tensor
    """One scale per output, or per group of inputs of each output; empty if the scales are interleaved with ``data``."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    bits: int = 8
    group: int = 0
    """Group size: inputs that share a scale; 0 for all inputs of an output."""
    lead: int = 0
    """Padding inputs before the first one: the rank's shard begins inside a group, and the group is held from its start."""
    zeros: torch.Tensor | None = None
    """Zero points of the groups; empty if interleaved with ``data``, None if every zero point is the middle code."""
    minima: torch.Tensor | None = None
    """Minima that are added to the weights of each group; empty if interleaved with ``data``, None without minima."""
    table: str = ""
    """Name in ``TABLES`` of the values of the codes; empty if a code is its own value."""
    values: torch.Tensor | None = None
    """Values of ``table`` on the weight's device, float32; None without a table, or if the implementation holds the table itself."""
    global_scale: float = 1.0
    """Power of two by which the stored float16 ``scales`` are multiplied in use. Their true values may exceed float16."""

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.float32  # 1.0 is exact in 8-bit activations, and float32 holds code times scale

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        others = (self.zeros, self.minima, self.values)
        return self.data.nbytes + self.scales.nbytes + sum(x.nbytes for x in others if x is not None)

    def clone(self) -> QuantizedWeight:
        return clone_tensors(self)


def clone_tensors(weight: Weight) -> Weight:
    """Copy of a packed matrix (a dataclass) with copies of its tensors."""
    values = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return dataclasses.replace(
        weight, **{name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
    )


def export_packed(weight: PackedWeight, name: str) -> dict[str, Any] | None:
    """Fields of a packed matrix as tensors and plain values, keyed by ``name``; None if its class is not a dataclass of such fields."""
    if not dataclasses.is_dataclass(weight):
        return None
    state: dict[str, Any] = {name: f"{type(weight).__module__}:{type(weight).__qualname__}"}
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif value is not None and not isinstance(value, (torch.Tensor, bool, int, float, str)):
            return None
        state[f"{name}.{field.name}"] = value
    return state


def import_packed(state: Mapping[str, Any], name: str) -> PackedWeight:
    """Inverse of ``export_packed``.

    Raises:
        KeyError: the matrix is of a class that this package does not have.
    """
    module, _, qualname = state[name].partition(":")
    if not module.startswith(PACKAGE):
        raise KeyError(module)
    cls = vars(sys.modules[module])[qualname]
    values = {field.name: state[f"{name}.{field.name}"] for field in dataclasses.fields(cls)}
    dtypes = {field.name for field in dataclasses.fields(cls) if field.type in (torch.dtype, "torch.dtype")}
    return cls(**values | {field: getattr(torch, values[field]) for field in dtypes})
