"""A module around one matrix of weights."""

from __future__ import annotations

from labinfer.functions.registry import MatrixFunctions
from labinfer.functions.weights import PackedWeight
from labinfer.layers.context import StageContext
from labinfer.weights.source import WeightedModule, empty_parameter


class Matrix(WeightedModule):
    """Has a parameter ``weight`` while it is loaded, and from ``pack`` on what its functions make of it.

    Args:
        functions: how it is held; a matrix of the layers or of the vocabulary.
    """

    def __init__(self, outputs: int, inputs: int, functions: MatrixFunctions, ctx: StageContext):
        super().__init__()
        self._functions = functions
        self._inputs = inputs
        self.packed: PackedWeight | None = None
        self.weight = empty_parameter(outputs, inputs, dtype=ctx.dtype)

    def pack(self) -> None:
        self.packed = self._functions.pack_weight(self.weight.detach())
        self.weight = None

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (self.packed.nbytes if self.packed is not None else 0)
