"""Slices of a checkpoint's tensors and matrices, with the memory that they are read into."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.weights.codes import Codes, Range


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """Part of one checkpoint tensor that is never quantized, such as a norm's weight or a bias."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: tuple[int, ...]
    """Full shape in the checkpoint."""
    ranges: tuple[Range, ...] = ()
    """Ranges of the leading dimensions; the other dimensions are read as a whole."""
    destination: torch.Tensor
    """View of the parameter, of the slice's shape."""


@dataclass(frozen=True, kw_only=True)
class MatrixStack:
    """Tensor of several matrices, (count, outputs, inputs), as some checkpoints store experts."""

    name: str
    """Full name of the tensor in the checkpoint."""
    shape: tuple[int, int, int]
    index: int
    """Index of the matrix in the tensor."""
    first_row: int
    """First row of the outputs in that matrix, if several projections are fused into it."""
    is_transposed: bool = False
    """Whether the tensor is (count, inputs, outputs), with the rows of two fused projections interleaved."""


@dataclass(frozen=True, kw_only=True)
class MatrixSlice:
    """Part of one matrix of a checkpoint. The format determines the tensors in which the matrix is stored."""

    name: str
    """Name of the matrix in the checkpoint: that of its tensors without the suffix (``.weight``)."""
    outputs: int
    inputs: int
    """Sizes of the full matrix, (outputs, inputs) as in Transformers' linear layers and embeddings."""
    rows: Range
    columns: Range
    """Ranges of outputs and inputs that this rank holds."""
    destination: torch.Tensor | Codes
    """View of the parameter, of shape (rows, columns), for dequantized values; or memory for quantized values in the form that the matrix's
    format has chosen."""
    stack: MatrixStack | None = None
    """Position in a stack, for checkpoints that store the matrix in one; see ``hugging_face/stack.py``."""

    @property
    def stacked_part(self) -> tuple[int, int]:
        """Number of projections fused into a matrix of the stack, and the index of this one."""
        return self.stack.shape[1] // self.outputs, self.stack.first_row // self.outputs


WeightSlice = TensorSlice | MatrixSlice
