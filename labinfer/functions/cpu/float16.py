"""Products and lookups over compiled functions for float16 weights; the rest of a float16 model takes the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.cpu.dense import look_up, multiply
from labinfer.functions.cpu.library import Library
from labinfer.functions.packed_weight import DenseWeight


class CpuFloat16:
    """An implementation of the function of its name in each method; ``protocols`` has their arguments. Sums are in float32.

    Args:
        library: see ``library.load``.
    """

    dtypes = (torch.float16,)

    def __init__(self, library: Library):
        self._library = library

    def calls(self) -> dict[str, Callable]:
        """Methods by function."""
        return {name: getattr(self, name) for name in ("pack_weight", "linear", "embedding")}

    def pack_weight(self, weight_OI: torch.Tensor) -> DenseWeight:
        self._library.pack_float16(weight_OI.data_ptr(), *weight_OI.shape, torch.get_num_threads())
        return DenseWeight(weight_OI, *weight_OI.shape)

    def linear(self, x_TI: torch.Tensor, weight: DenseWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        bias_O = None if bias_O is None else bias_O.float()
        return multiply(self._library.linear_float16, x_TI.float(), weight, bias_O).half()

    def embedding(self, token_ids_T: torch.Tensor, table: DenseWeight, first: int) -> torch.Tensor:
        return look_up(self._library.embedding_float16, token_ids_T, table, first)
