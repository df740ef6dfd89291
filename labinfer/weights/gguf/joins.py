"""Joined: a tensor that GGUF files store in two parts, joined on loading. halves: the two halves of a fused tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from labinfer.weights.gguf.header import GgufTensor

ReadValues = Callable[[GgufTensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Reads values of a tensor at given rows and columns (indices), as float32. Rows are counted over all dimensions but the last."""


@dataclass(frozen=True)
class Joined(ABC):
    """Tensor that is joined from two stored tensors."""

    first: GgufTensor
    second: GgufTensor

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...] | None:
        """Rows and columns; None if the parts are incompatible."""

    @abstractmethod
    def rows(self, read: ReadValues, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin`` to ``end`` of the joined tensor: (end - begin, columns) float32."""


class InterleavedColumns(Joined):
    """Tensor whose columns alternate between two stored tensors: gate and up of gpt-oss."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        rows, columns = self.first.shape[0], self.first.shape[-1]
        return (rows, 2 * columns) if self.first.shape == self.second.shape == (rows, columns) else None

    def rows(self, read: ReadValues, begin: int, end: int) -> torch.Tensor:
        rows, columns = torch.arange(begin, end), torch.arange(self.first.shape[-1])
        return torch.stack([read(part, rows, columns) for part in (self.first, self.second)], dim=-1).flatten(1)


class Heads(Joined):
    """Tensor with, for each head, its key rows (stored transposed) and then its value rows: DeepSeek's ``kv_b_proj``.

    The first stored tensor is (heads, inputs, key rows), the second (heads, value rows, inputs).

    Source: ggml-org/llama.cpp, conversion/deepseek.py: ``k_b_proj`` and ``v_b_proj``.
    """

    @property
    def shape(self) -> tuple[int, ...] | None:
        if len(self.first.shape) != 3 or len(self.second.shape) != 3:
            return None
        heads, inputs, keys = self.first.shape
        own_heads, values, own_inputs = self.second.shape
        return (heads * (keys + values), inputs) if (heads, inputs) == (own_heads, own_inputs) else None

    def rows(self, read: ReadValues, begin: int, end: int) -> torch.Tensor:
        (_, inputs, keys), values = self.first.shape, self.second.shape[1]
        size = keys + values
        first, last = begin // size, -(-end // size)
        keys_HIK = read(self.first, torch.arange(first * inputs, last * inputs), torch.arange(keys))
        values_HVI = read(self.second, torch.arange(first * values, last * values), torch.arange(inputs))
        parts = keys_HIK.view(-1, inputs, keys).transpose(1, 2), values_HVI.view(-1, values, inputs)
        return torch.cat(parts, dim=1).flatten(0, 1)[begin - first * size : end - first * size]


JOINS: dict[str, type[Joined]] = {"interleaved": InterleavedColumns, "heads": Heads}
"""Ways to join two stored tensors, by their names in ``family.Join``."""


def halves(tensor: GgufTensor, count: int = 0) -> tuple[GgufTensor, GgufTensor] | None:
    """First and second halves of every matrix of a stack (along its rows), or of every vector; None if it cannot be halved.

    Args:
        tensor: (count, rows, inputs) or (count, elements); or a matrix (count * rows, inputs), if ``count`` is given. The halves of a
            matrix are matrices.
        count: number of groups of rows in a matrix; 0 if the tensor is a stack.
    """
    shape = tensor.shape
    if count and len(shape) == 2 and shape[0] % count == 0:
        shape = (count, shape[0] // count, shape[1])
    elif count or len(shape) not in (2, 3):
        return None
    pieces, size, *inputs = shape
    middle = size // 2
    if size % 2 or (pieces, middle, *inputs)[-1] % tensor.type.size:
        return None
    pitch = math.prod(shape[1:-1]) * tensor.row_bytes
    own = (pieces * middle, *inputs) if count else (pieces, middle, *inputs)
    half = replace(tensor, shape=own, rows_together=middle if inputs else 1, pitch=pitch)
    return (
        replace(half, name=f"{tensor.name}[:, :{middle}]"),
        replace(half, name=f"{tensor.name}[:, {middle}:]", position=tensor.position + pitch // 2),
    )
