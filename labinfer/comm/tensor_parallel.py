"""TensorParallelCommunicator: the exchanges of a layer with the other tensor-parallel ranks of its stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.comm.communicator import Communicator


class TensorParallelCommunicator:
    """A group of ranks that hold slices of the same layers. Layers receive it in their constructor."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' partial results, in place; the tensor itself when there is one rank."""
        if self.size == 1:
            return partial
        if has_torch_function((partial,)):  # whoever looks on sees this as one of torch's operations
            return handle_torch_function(self.all_reduce, (partial,), partial)
        return self._comm.all_reduce(partial)

    all_reduce.repeats_in_place = True

    def share(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """The first rank's numbers, ``count`` of them, on all ranks; what the others give does not matter."""
        if self.size == 1 or not count:
            return list(numbers or ())
        mine = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        return self._comm.all_gather(mine)[0].tolist()

    def gather_columns(self, slice_BV: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """On tp rank 0 the ranks' column slices (``widths[r]`` columns of rank r) side by side; None elsewhere."""
        if self.size == 1:
            return slice_BV
        if has_torch_function((slice_BV,)):
            return handle_torch_function(self.gather_columns, (slice_BV,), slice_BV, widths)
        rows = slice_BV.shape[0]
        parts = self._comm.gather(slice_BV.contiguous(), [rows * width for width in widths])
        if parts is None:
            return None
        return torch.cat([part.view(rows, width) for part, width in zip(parts, widths, strict=True)], dim=1)
