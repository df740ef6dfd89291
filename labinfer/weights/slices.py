"""Slices of a checkpoint's tensors and matrices, each with the memory that the slice is read into."""

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
    """Shape of the whole tensor in the checkpoint."""
    ranges: tuple[Range, ...] = ()
    """Ranges of the leading dimensions to read; the other dimensions are read as a whole."""
    destination: torch.Tensor
    """View of the parameter, of the slice's shape."""


@dataclass(frozen=True, kw_only=True)
class MatrixStack:
    """Tensor of several matrices, (count, outputs, inputs), as some checkpoints store experts."""

    name: str
    """Name with suffix of the tensor in the checkpoint."""
    shape: tuple[int, int, int]
    index: int
    """Index of the matrix in the tensor."""
    first_row: int
    """First row of the projection's outputs in the matrix ``index``, into which several projections may be fused."""
    is_transposed: bool = False
    """Whether the tensor is (count, inputs, outputs), with alternating rows of two fused projections."""
    may_be_input_major: bool = False
    """Whether the tensor may be (count, inputs, outputs) with the outputs of two fused projections one after another. Its shape decides."""


@dataclass(frozen=True, kw_only=True)
class MatrixSlice:
    """Part of one matrix of a checkpoint. The format determines the tensors in which the matrix is stored."""

    name: str
    """Name of the matrix in the checkpoint: the name of its tensors without a suffix such as ``.weight``."""
    outputs: int
    inputs: int
    """Sizes of the whole matrix, (outputs, inputs) as in Transformers' linear layers and embeddings."""
    rows: Range
    columns: Range
    """Ranges of outputs and inputs that this rank holds."""
    destination: torch.Tensor | Codes
    """For dequantized values a view of the parameter, (rows, columns); for quantized values memory in the form that the format chose."""
    stack: MatrixStack | None = None
    """Position in a stack, for checkpoints that store the matrix in one; see ``hugging_face/stack.py``."""

    @property
    def stacked_part(self) -> tuple[int, int]:
        """Number of projections fused into a matrix of the stack, and the index of this projection."""
        return self.stack.shape[1] // self.outputs, self.stack.first_row // self.outputs


WeightSlice = TensorSlice | MatrixSlice
