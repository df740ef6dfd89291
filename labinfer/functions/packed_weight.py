"""``PackedWeight``: a matrix of weights as ``pack_weight`` leaves it and ``linear`` and ``embedding`` read it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

TABLES = {
    "": (),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""Numbers that codes of 4 bits stand for: twice those of MXFP4 (OCP Microscaling Formats 1.0, 5.3.3), with powers of two as scales; and
those of IQ4_NL and IQ4_XS (ggml-org/llama.cpp, ggml/src/ggml-common.h). Compiled functions know them by their places here."""
POWERS_OF_TWO = ("e2m1",)
"""Tables whose scales are powers of two."""
PACKAGE = __name__.rpartition(".")[0] + "."


class PackedWeight(Protocol):
    """A matrix (outputs, inputs) in the layout of one implementation. What else it has only that implementation knows."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix it was made of, and of rows that are looked up in it."""

    @property
    def exact_dtype(self) -> torch.dtype:
        """Dtype of activations with which the product of a unit vector is a column without another rounding."""

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """All that it takes, scales included."""

    def clone(self) -> PackedWeight:
        """The same matrix in memory of its own."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix in its own dtype; the order of ``data`` is its implementation's."""

    data: torch.Tensor
    outputs: int
    inputs: int

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def exact_dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def clone(self) -> DenseWeight:
        return DenseWeight(self.data.clone(), self.outputs, self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix in whole numbers; the order of ``data`` and ``scales`` is its implementation's."""

    data: torch.Tensor
    scales: torch.Tensor
    """One for each output, or for each group of inputs of each output; empty where they are among the data."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    bits: int = 8
    group: int = 0
    """Inputs that share a scale; 0 for all."""
    lead: int = 0
    """Inputs that are held before the first, because the first group begins outside of what this rank holds."""
    zeros: torch.Tensor | None = None
    """Zero points of the groups; empty where they are among the data, None where all are in the middle."""
    minima: torch.Tensor | None = None
    """Likewise what is added to the weights of each group; None for nothing."""
    table: str = ""
    """Name in ``TABLES`` of what the codes stand for; empty for their own numbers."""
    unit: float = 1.0
    """Power of two that all scales are to be multiplied with, so that float16 can hold them."""

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.float32  # a one is exact in 8 bits, and float32 holds what it is multiplied with

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        offsets = (self.zeros, self.minima)
        return self.data.nbytes + self.scales.nbytes + sum(x.nbytes for x in offsets if x is not None)

    def clone(self) -> QuantizedWeight:
        return dataclasses.replace(self, data=self.data.clone(), scales=self.scales.clone())


def export_packed(weight: PackedWeight, name: str) -> dict[str, Any] | None:
    """The fields of a packed matrix as tensors and plain values, under a name; None where its class is no dataclass of these."""
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
    """The matrix that ``export_packed`` has brought into this form.

    Raises:
        KeyError: it is of a class that these functions do not have.
    """
    module, _, qualname = state[name].partition(":")
    if not module.startswith(PACKAGE):
        raise KeyError(module)
    cls = vars(sys.modules[module])[qualname]
    values = {field.name: state[f"{name}.{field.name}"] for field in dataclasses.fields(cls)}
    dtypes = {field.name for field in dataclasses.fields(cls) if field.type in (torch.dtype, "torch.dtype")}
    return cls(**values | {field: getattr(torch, values[field]) for field in dtypes})
