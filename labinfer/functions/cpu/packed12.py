"""Lossless compression of bfloat16 to 12 bits a weight: products read 3/4 of the bytes, bit-identical to those of ``floats.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from labinfer.functions.cpu.dense import PANEL, Finish, look_up, multiply
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.library import Library, new_bytes
from labinfer.functions.packed_weight import DenseWeight, PackedWeight
from labinfer.functions.segmented_weight import SegmentedWeight

MAX_PATCHED = 0.01
"""Maximum fraction of a matrix's weights whose exponents have no 4-bit code; a matrix with more stays uncompressed."""


@dataclass(frozen=True, slots=True)
class CpuPacked12Weight:
    """A matrix in 12 bits a weight; ``packed12.h`` defines the order of ``data``."""

    data: torch.Tensor
    outputs: int
    inputs: int
    in_12_bits: ClassVar[bool] = True

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
    """Each method implements the function of equal name. Matrices that cannot be compressed are stored uncompressed.

    Args:
        library: see ``library.load``.
        kernel: see ``CpuFunctions``.
    """

    dtypes = (torch.bfloat16,)

    def __init__(self, library: Library, kernel: str = ""):
        self._library, self._plain = library, CpuFunctions(library, kernel)
        self._linear = library.find("linear12", kernel)

    def calls(self) -> dict[str, Callable]:
        """Function name → method of this object that implements the function."""
        return {name: getattr(self, name) for name in ("pack_weight", "linear", "gated_linear", "embedding")}

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

    def linear(
        self, x_TI: torch.Tensor, weight: PackedWeight | SegmentedWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, DenseWeight | SegmentedWeight):
            return self._plain.linear(x_TI, weight, bias_O)
        return multiply(self._linear, x_TI, weight, bias_O)

    def gated_linear(
        self, x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None, *, gelu: bool = False
    ) -> torch.Tensor:
        finish = Finish.gate(gelu)
        if isinstance(weight, DenseWeight):
            return self._plain.gated_linear(x_TI, weight, bias_O, gelu=gelu)
        if not finish.takes(weight.outputs):
            return self._plain.activate(self.linear(x_TI, weight, bias_O), gelu)
        return multiply(self._linear, x_TI, weight, bias_O, finish)

    def embedding(self, token_ids_T: torch.Tensor, table: PackedWeight, first: int) -> torch.Tensor:
        if isinstance(table, DenseWeight):
            return self._plain.embedding(token_ids_T, table, first)
        return look_up(self._library.embedding12, token_ids_T, table, first)
