"""Where a parameter's bytes come from: a slice of a tensor in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TensorSource:
    """One checkpoint tensor, or the part of it that this rank holds."""

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """Its full shape there."""
    dim: int
    begin: int
    end: int
    """The range along ``dim`` that this rank holds."""
    destination: torch.Tensor
    """A view of the parameter, of the slice's shape."""


def whole(name: str, parameter: torch.Tensor) -> TensorSource:
    """All of a tensor that every rank holds."""
    return TensorSource(name, tuple(parameter.shape), 0, 0, parameter.shape[0], parameter.detach())


class WeightedModule(nn.Module):
    """A module with parameters of its own; ``prefix`` is its name in the checkpoint."""

    def sources(self, prefix: str) -> Iterator[TensorSource]:
        """Where this module's own parameters come from, children excluded."""
        raise NotImplementedError

    def pack(self) -> None:
        """Called once the parameters are loaded: bring them into the form in which functions read them."""

    @property
    def num_bytes(self) -> int:
        """What this module holds by itself."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
