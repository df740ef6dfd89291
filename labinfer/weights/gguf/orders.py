"""Orders of rows (or columns) of matrices in GGUF files, where they are not those of the checkpoint that was converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Order(Protocol):
    """The places that rows have in a file."""

    def stored(self, begin: int, end: int) -> torch.Tensor:
        """Numbers in the file of these rows of the checkpoint, int64."""


@dataclass(frozen=True)
class RotatedPairs:
    """Llama's queries and keys: the two rows of a head that are rotated together follow one another.

    In the checkpoint they are half a head apart.

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
    """Value heads of Gated DeltaNet: the first of every key head, then the second of every one, and so on.

    In the checkpoint those of one key head follow one another.

    Args:
        groups: key heads.
        group: value heads of each.
        size: rows of a head.
        offset: rows before the first head, which stay.

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
