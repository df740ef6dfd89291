"""``SegmentedLinear``: a row-parallel projection whose bits do not depend on the tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import nn

from labinfer.functions.protocols import Linear
from labinfer.functions.segmented_weight import SegmentedWeight
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.linear import RowParallelLinear
from labinfer.models.layers.segments import SUMMED_ROWS, SegmentSum, Shard, without_segment
from labinfer.weights.slices import Range, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


class SegmentedLinear(WeightedModule):
    """A projection split by input columns, with a separately quantized matrix for each segment (see ``SegmentSum``).

    Args:
        shard: range of the inputs of a rank.
    """

    def __init__(self, in_features: int, shard: Shard, out_features: int, bias: bool, ctx: StageContext):
        super().__init__()
        begin, end = shard(ctx.tp.size, ctx.tp.rank)
        self.num_inputs, self._begin, self._num_outputs = end - begin, begin, out_features
        self._sum = SegmentSum(shard, ctx.tp)
        self.segments = nn.ModuleList(
            MatrixSegment(in_features, columns, out_features, ctx) for _, columns in self._sum.segments
        )
        self.bias = empty_parameter(out_features, dtype=ctx.dtype) if bias else None

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        """(T, F) → (T, O), the sum over all ranks plus the bias."""
        if self._sum.is_local:
            out_TO = self.segments[0].linear(x_TF, self._weight)
        else:
            out_TO = x_TF.new_empty(x_TF.shape[0], self._num_outputs)
            for begin in range(0, x_TF.shape[0], SUMMED_ROWS):
                rows = slice(begin, begin + SUMMED_ROWS)
                self._sum.add_ranks(out_TO[rows], self._own_sums(x_TF[rows]))
        return out_TO if self.bias is None else out_TO + self.bias

    def _own_sums(self, x_TF: torch.Tensor) -> torch.Tensor:
        if len(self.segments) == 0:
            return self._sum.empty_sums(x_TF, (x_TF.shape[0], self._num_outputs))
        return self.segments[0].linear(x_TF, self._weight)

    @cached_property
    def _weight(self) -> SegmentedWeight:
        """The segments' matrices; made at the first step, when they are packed."""
        return self._sum.weight(segment.packed for segment in self.segments)

    partial = forward
    """The whole sum, as of ``forward``: adding this rank's part to other tensors first would change the bits of the sum."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        if self.bias is not None:
            yield TensorSlice(name=f"{prefix}.bias", shape=(self._num_outputs,), destination=self.bias)


class MatrixSegment(RowParallelLinear):
    """Input columns of a row-parallel matrix; ``SegmentedLinear`` adds the products and the bias.

    Args:
        columns: (begin, end) of the columns.
    """

    def __init__(self, in_features: int, columns: Range, out_features: int, ctx: StageContext):
        super().__init__(in_features, columns, out_features, False, ctx)

    @property
    def linear(self) -> Linear:
        """The function ``linear`` that multiplies rows by this segment's packed matrix."""
        return self._functions.linear

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return super().slices(without_segment(prefix))
