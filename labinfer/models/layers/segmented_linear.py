"""``SegmentedLinear``: a row-parallel projection whose bits do not depend on the tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from labinfer.models.layers.context import StageContext
from labinfer.models.layers.linear import RowParallelLinear
from labinfer.models.layers.segments import SegmentSum, Shard, without_segment
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
        parts = [
            segment(x_TF[:, begin - self._begin : end - self._begin])
            for segment, (_, (begin, end)) in zip(self.segments, self._sum.segments, strict=True)
        ]
        if len(parts) == 1 and self._sum.is_local:
            out_TO = parts[0]
        else:
            out_TO = self._sum.add(x_TF.new_empty(x_TF.shape[0], self._num_outputs), *parts)
        return out_TO if self.bias is None else out_TO + self.bias

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

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        """(T, F) → (T, O) of the segment's columns."""
        return self.product(x_TF)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return super().slices(without_segment(prefix))
