"""Implementations that are wrong by 1 %, one for each function, to see that trials find them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from labinfer.functions.registry import FunctionRegistry, Implementation

READERS = {"pack_weight": "linear", "pack_codes": "linear", "make_experts": "experts"}
"""Function whose trial finds a fault of a packing function."""
READ_WEIGHTS = ("pack_weight", "pack_codes", "linear", "gated_linear", "embedding", "make_experts", "experts")


def spoil(value):
    """A result with a fault of 1 %: numbers are scaled, indices are moved, packed weights have other scales."""
    if isinstance(value, tuple):
        return (spoil(value[0]), *value[1:])
    if isinstance(value, list):
        return [token + 1 for token in value]
    if isinstance(value, torch.Tensor):
        return value * 1.01 if value.is_floating_point() else (value + 1) % 5
    if hasattr(value, "scales"):
        return dataclasses.replace(value, scales=(value.scales.float() * 1.01).to(value.scales.dtype))
    if hasattr(value, "data"):
        return dataclasses.replace(value, data=value.data * 1.01)
    value.pairs = SpoiledPairs(value.pairs)  # experts, which are packed later
    return value


class SpoiledPairs(list):
    """Matrices of experts, each of which is spoiled when it is stored."""

    def __setitem__(self, index, pair):
        super().__setitem__(index, (spoil(pair[0]), pair[1]))


def plant(registry: FunctionRegistry, reference: FunctionRegistry, function: str, quantization: str = "none") -> str:
    """Add an implementation of ``function`` that is wrong. Returns its name, which the function that reads packed weights shares.

    Args:
        reference: registry of the reference.
        quantization: that of the weights, if the function packs or reads any.
    """
    name = f"planted-{function}"

    def find(function: str) -> Callable:
        weights = quantization if function in READ_WEIGHTS else "none"
        return reference.candidates(function, torch.device("cpu"), torch.float32, None, weights)["reference"].call

    def gated_linear(x_TI, weight, bias_O=None, *, gelu=False):
        return find("gelu_and_mul" if gelu else "silu_and_mul")(find("linear")(x_TI, weight, bias_O))

    for each in {function, READERS.get(function, function)}:
        right = gated_linear if each == "gated_linear" else find(each)
        call = (lambda *args, right=right, **named: spoil(right(*args, **named))) if each == function else right
        weights = quantization if each in READ_WEIGHTS else "none"
        layout = name if function in READERS else "plain"
        registry.add(each, Implementation(name=name, call=call, quantization=weights, layout=layout))
    return name
