"""bfloat16 held in 12 bits, bit for bit: products with the same bits as those of ``bfloat16.py``, from three quarters of the
bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from labinfer.functions.cpu.bfloat16 import CpuFunctions
from labinfer.functions.cpu.library import Library, new_bytes
from labinfer.functions.cpu.quantized import PANEL
from labinfer.functions.packed_weight import DenseWeight, PackedWeight

MAX_PATCHED = 0.01
"""Part of a matrix's weights whose exponents may be outside of those that 4 bits hold; with more it stays in 16 bits."""


@dataclass(frozen=True, slots=True)
class CpuPacked12Weight:
    """A matrix in 12 bits a weight; ``packed12.h`` has the order of ``data``."""

    data: torch.Tensor
    outputs: int
    inputs: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def clone(self) -> CpuPacked12Weight:
        return replace(self, data=self.data.clone())


class CpuPacked12:
    """An implementation of the function of its name in each method. Matrices that do not fit 12 bits stay as they are.

    Args:
        library: see ``library.load``.
        dot: see ``CpuFunctions``.
    """

    dtypes = (torch.bfloat16,)

    def __init__(self, library: Library, dot: bool = False):
        self._library, self._plain = library, CpuFunctions(library, dot)
        self._linear = library.linear12_dot if dot else library.linear12

    def calls(self) -> dict[str, Callable]:
        """Methods by function."""
        return {name: getattr(self, name) for name in ("pack_weight", "linear", "embedding")}

    def pack_weight(self, weight_OI: torch.Tensor) -> PackedWeight:
        outputs, inputs = weight_OI.shape
        panels = outputs // PANEL
        if inputs % 2 or not panels:
            return self._plain.pack_weight(weight_OI)
        threads = torch.get_num_threads()
        bases_P, begin_P = torch.empty(panels, dtype=torch.uint8), torch.empty(panels + 1, dtype=torch.int64)
        num_patches = self._library.count_patches(
            weight_OI.data_ptr(), outputs, inputs, bases_P.data_ptr(), begin_P.data_ptr(), threads
        )
        if num_patches > MAX_PATCHED * weight_OI.numel():
            return self._plain.pack_weight(weight_OI)
        data = new_bytes(self._library.packed12_bytes(outputs, inputs, num_patches))
        self._library.pack12(
            weight_OI.data_ptr(), bases_P.data_ptr(), begin_P.data_ptr(), data.data_ptr(), outputs, inputs, threads
        )
        return CpuPacked12Weight(data, outputs, inputs)

    def linear(self, x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, DenseWeight):
            return self._plain.linear(x_TI, weight, bias_O)
        x_TI = x_TI.contiguous()
        out_TO = x_TI.new_empty(x_TI.shape[0], weight.outputs)
        self._linear(
            x_TI.data_ptr(),
            weight.data.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            out_TO.data_ptr(),
            x_TI.shape[0],
            weight.outputs,
            weight.inputs,
            torch.get_num_threads(),
        )
        return out_TO

    def embedding(self, token_ids_T: torch.Tensor, table: PackedWeight, first: int) -> torch.Tensor:
        if isinstance(table, DenseWeight):
            return self._plain.embedding(token_ids_T, table, first)
        out_TD = torch.empty(token_ids_T.shape[0], table.inputs, dtype=table.dtype)
        self._library.embedding12(
            token_ids_T.data_ptr(),
            table.data.data_ptr(),
            out_TD.data_ptr(),
            token_ids_T.shape[0],
            table.outputs,
            table.inputs,
            first,
            torch.get_num_threads(),
        )
        return out_TD
