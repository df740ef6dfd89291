"""StageContext: constructor arguments that all layers of a stage share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.functions import Functions
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.codes import QuantLayout

ExpertCut = Literal["columns", "whole"]
"""Sharding of experts over TP ranks: a range of columns of every expert, or whole experts."""


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """A rank's share of a stage: tensor-parallel group, functions, dtype, range of layers, and tensor names of the checkpoint."""

    tp: TensorParallelCommunicator
    functions: Functions
    dtype: torch.dtype
    first_layer: int
    last_layer: int
    """End of the stage's layers, exclusive."""
    is_first: bool
    is_last: bool
    form: Callable[[str], QuantLayout | None] = lambda matrix: None
    """Name of a matrix in the checkpoint → the quantized form in which to hold it; None for a dequantized matrix."""
    experts: ExpertCut = "columns"
    names: CheckpointNames = CheckpointNames()  # noqa: RUF009 - it is frozen
    row_parallel: Callable[..., Any] | None = None
    """Makes the row-parallel layers of a reproducible run, which sum over all ranks, from the arguments of ``layers.linear.row_parallel``;
    None in other runs."""

    def sum_partials(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of a row-parallel layer's result: ``partial`` itself in a reproducible run, else the all-reduce in place."""
        return self.tp.all_reduce(partial) if self.row_parallel is None else partial
