"""Slices of a checkpoint's tensors and matrices, with the memory they belong in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.weights.codes import Codes, Range


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """Part of one checkpoint tensor that is stored as it is: the weight of a norm, a bias."""

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """Full shape in the checkpoint."""
    ranges: tuple[Range, ...] = ()
    """A range for each leading dimension; dimensions beyond them are taken whole."""
    destination: torch.Tensor
    """A view of the parameter, of the slice's shape."""


@dataclass(frozen=True, kw_only=True)
class MatrixStack:
    """A tensor of many matrices, (count, outputs, inputs), as some checkpoints store experts."""

    name: str
    """The tensor's whole name in the checkpoint."""
    shape: tuple[int, int, int]
    index: int
    """Number of the matrix among those of the tensor."""
    first_row: int
    """Row of that matrix at which its outputs begin, where several projections are one matrix."""
    is_transposed: bool = False
    """Whether values are stored as (count, inputs, outputs), and rows of two projections that are one matrix take turns."""


@dataclass(frozen=True, kw_only=True)
class MatrixSlice:
    """Part of one matrix of a checkpoint, whose format says in which tensors it is stored and how."""

    name: str
    """The matrix's name in the checkpoint: that of its tensors without their last part (``.weight``)."""
    outputs: int
    inputs: int
    """Sizes of the full matrix, (outputs, inputs) as in Transformers' linear layers and embeddings."""
    rows: Range
    columns: Range
    """The outputs and inputs that this rank holds."""
    destination: torch.Tensor | Codes
    """A view of the parameter, of shape (rows, columns), in which the decoded values belong; or memory for codes in the form
    that the matrix's format has named."""
    stack: MatrixStack | None = None
    """The matrix's place in checkpoints that have this tensor instead, see ``hugging_face/stack.py``."""

    @property
    def stacked_part(self) -> tuple[int, int]:
        """Number of projections that are one matrix of the stack, and which of them this is."""
        return self.stack.shape[1] // self.outputs, self.stack.first_row // self.outputs


WeightSlice = TensorSlice | MatrixSlice
