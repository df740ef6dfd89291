"""StageContext: the things that every layer of a stage is built with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.functions import Functions
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.codes import CodeForm

ExpertCut = Literal["columns", "whole"]
"""A tp rank's part of a mixture: some columns of every expert, or some experts whole."""


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """A rank's share of a stage: tensor-parallel group, functions, dtype, layers, and names of the checkpoint."""

    tp: TensorParallelCommunicator
    functions: Functions
    dtype: torch.dtype
    first_layer: int
    last_layer: int
    """The end of the layers, which is not among them."""
    is_first: bool
    is_last: bool
    form: Callable[[str], CodeForm | None] = lambda matrix: None
    """The form of codes in which a matrix of the checkpoint is to be held, by its name there; None for values."""
    experts: ExpertCut = "columns"
    names: CheckpointNames = CheckpointNames()  # noqa: RUF009 - it is frozen
