"""TensorParallelCommunicator: collectives of layers over the tensor-parallel ranks of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.comm.communicator import Communicator


class TensorParallelCommunicator:
    """Group of ranks that hold shards of equal layers (a stage). Layers receive it in their constructor. ``host_comm``
    connects these ranks through host memory, if ``comm`` sends between accelerators."""

    def __init__(self, comm: Communicator, host_comm: Communicator | None = None):
        self._comm, self._host_comm = comm, host_comm or comm
        self.rank, self.size = comm.rank, comm.size

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' partial results, in place; ``partial`` itself with one rank."""
        if self.size == 1:
            return partial
        if has_torch_function((partial,)):  # observers (torch functions) see this as one operation
            return handle_torch_function(self.all_reduce, (partial,), partial)
        return self._comm.all_reduce(partial)

    all_reduce.repeats_in_place = True

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of all ranks, of equal shapes, in rank order."""
        return self._comm.all_gather(tensor)

    def share(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """Broadcast ``count`` numbers of the first rank to all ranks. The argument ``numbers`` of other ranks is ignored."""
        if self.size == 1 or not count:
            return list(numbers or ())
        mine = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        return self._host_comm.all_gather(mine)[0].tolist()

    def gather_columns(self, slice_BV: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """On tp rank 0 the column shards of all ranks, concatenated (``widths[r]`` columns of rank r); None on other ranks."""
        if self.size == 1:
            return slice_BV
        if has_torch_function((slice_BV,)):
            return handle_torch_function(self.gather_columns, (slice_BV,), slice_BV, widths)
        rows = slice_BV.shape[0]
        parts = self._comm.gather(slice_BV.contiguous(), [rows * width for width in widths])
        if parts is None:
            return None
        return torch.cat([part.view(rows, width) for part, width in zip(parts, widths, strict=True)], dim=1)
