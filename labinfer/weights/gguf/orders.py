"""Orders of rows (or columns) that a matrix has in a GGUF file and not in the Hugging Face checkpoint it was converted from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Order(Protocol):
    """Permutation of rows (or columns) between a Hugging Face checkpoint and a GGUF file."""

    def stored(self, begin: int, end: int) -> torch.Tensor:
        """Indices in the GGUF file, int64, of rows ``begin`` to ``end`` of the Hugging Face checkpoint."""


@dataclass(frozen=True)
class RotatedPairs:
    """Order of Llama's queries and keys: the two rows of a head that rope rotates together are adjacent.

    In the Hugging Face checkpoint the two rows are half a head apart.

    Source: ggml-org/llama.cpp, convert_hf_to_gguf.py, ``LlamaModel.permute``.
    """

    head_size: int

    def stored(self, begin: int, end: int) -> torch.Tensor:
        rows = torch.arange(begin, end)
        inside = rows % self.head_size
        half = self.head_size // 2
        return rows - inside + inside % half * 2 + inside // half


@dataclass(frozen=True)
class TiledHeads:
    """Order of Gated DeltaNet's value heads: first the first value head of every key head, then the second of every key head, and
    so on.

    In the Hugging Face checkpoint the value heads of one key head are adjacent.

    Args:
        groups: number of key heads.
        group: value heads per key head.
        size: rows of a value head.
        offset: rows before the first value head, which are not reordered.

    Source: ggml-org/llama.cpp, convert_hf_to_gguf.py, for Qwen3.5.
    """

    groups: int
    group: int
    size: int = 1
    offset: int = 0

    def stored(self, begin: int, end: int) -> torch.Tensor:
        rows = torch.arange(begin, end)
        head, inside = (rows - self.offset) // self.size, (rows - self.offset) % self.size
        tiled = self.offset + (head % self.group * self.groups + head // self.group) * self.size + inside
        return torch.where(rows < self.offset, rows, tiled)
