"""``Matrix``: a module with one weight matrix, plain or quantized."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labinfer.base.errors import UserError
from labinfer.functions.calls import FunctionCall, LinearCall
from labinfer.functions.functions import MatrixFunctions, MatrixKind
from labinfer.functions.packed_weight import PackedWeight, export_packed, import_packed
from labinfer.models.layers.context import StageContext
from labinfer.weights.codes import Codes, QuantLayout, Range
from labinfer.weights.slices import MatrixSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass
class MatrixBlock:
    """Consecutive outputs of a matrix that are stored alike: dequantized, or quantized in one ``QuantLayout``."""

    rows: Range
    functions: MatrixFunctions
    codes: Codes | None = None
    """Memory for quantized weights until they are packed; None if the block uses the matrix's ``weight``."""
    packed: PackedWeight | None = None

    @property
    def slice(self) -> slice:
        return slice(*self.rows)


class Matrix(WeightedModule):
    """A matrix: a parameter ``weight``, or quantized ``Codes``, during loading; packed by its functions afterwards.

    If the checkpoint stores projections that are merged here in different forms, the matrix has several blocks.

    Args:
        kind: selects the quantization; a matrix of kind ``exact`` holds no codes.
    """

    def __init__(self, outputs: int, inputs: int, kind: MatrixKind, ctx: StageContext):
        super().__init__()
        self._code_functions = ctx.functions.codes if kind != "exact" else {}
        self.num_outputs, self.num_inputs, self.dtype = outputs, inputs, ctx.dtype
        self._blocks = [MatrixBlock((0, outputs), ctx.functions.matrices[kind])]
        self.weight = empty_parameter(outputs, inputs, dtype=ctx.dtype)

    @property
    def _functions(self) -> MatrixFunctions:
        """Functions that pack and multiply the matrix, if it has a single block."""
        (block,) = self._blocks
        return block.functions

    @property
    def packed(self) -> PackedWeight | None:
        """Packed weight of a matrix that is not fused from several; None before packing."""
        (block,) = self._blocks
        return block.packed

    def choose_forms(self, prefix: str, form: Callable[[str], QuantLayout | None]) -> None:
        if not self._code_functions:
            return
        parts = [part for part in self.slices(prefix) if isinstance(part, MatrixSlice)]
        forms = [(part, form(part.name)) for part in parts]
        if all(chosen is None for _, chosen in forms):
            return
        values, self._blocks, begin = self._functions, [], 0
        for chosen, run in itertools.groupby(forms, key=lambda part_and_form: part_and_form[1]):
            parts = [part for part, _ in run]
            end = begin + sum(part.rows[1] - part.rows[0] for part in parts)
            if chosen is None:
                self._blocks.append(MatrixBlock((begin, end), values))
            else:
                codes = Codes.empty(chosen, end - begin, parts[0].columns, self.weight.device)
                functions = self._code_functions[chosen.quantization]
                if functions.pack_codes is None:
                    lacks = f"the layout of {functions.packing!r} has no pack_codes, which quantized checkpoints need"
                    raise UserError(f"{lacks}; register it, or give --functions linear=reference")
                self._blocks.append(MatrixBlock((begin, end), functions, codes))
            begin = end
        if all(block.codes is not None for block in self._blocks):
            self.weight = None

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        for block in self._blocks:
            if block.codes is not None:
                block.codes = Codes.empty(block.codes.form, block.rows[1] - block.rows[0], block.codes.columns, device)

    def memory(self, begin: int, end: int) -> torch.Tensor | Codes:
        """Memory for loading the outputs ``begin`` to ``end``, which must be in one block."""
        for block in self._blocks:
            if block.rows[0] <= begin and end <= block.rows[1]:
                if block.codes is None:
                    return self.weight[begin:end]
                return block.codes.rows(begin - block.rows[0], end - block.rows[0])
        raise AssertionError(f"outputs {begin} to {end} are of several blocks")

    def pack(self) -> None:
        for block in self._blocks:
            if (codes := block.codes) is None:
                weight_OI = self.weight.detach()
                rows_OI = weight_OI if len(self._blocks) == 1 else weight_OI[block.slice].clone()
                block.packed = block.functions.pack_weight(rows_OI)
            else:
                block.packed, block.codes = block.functions.pack_codes(codes, self.dtype), None
        self.weight = None

    @property
    def packing(self) -> str:
        return " ".join(f"{block.rows} {block.functions.packing}" for block in self._blocks)

    def export_packed(self) -> dict[str, Any] | None:
        state = super().export_packed()
        for index, block in enumerate(self._blocks):
            if (fields := export_packed(block.packed, f"block {index}")) is None:
                return None
            state |= fields
        return state

    def import_packed(self, state: Mapping[str, Any]) -> None:
        for index, block in enumerate(self._blocks):
            block.packed, block.codes = import_packed(state, f"block {index}"), None
        self.weight = None
        super().import_packed(state)

    def product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` in the dtype of x; a partial sum if the inputs are split over ranks."""
        if len(self._blocks) == 1:
            block = self._blocks[0]
            return block.functions.linear(x_TI, block.packed, bias_O)
        outs = (
            block.functions.linear(x_TI, block.packed, None if bias_O is None else bias_O[block.slice])
            for block in self._blocks
        )
        return torch.cat(list(outs), dim=1)

    @property
    def can_gate(self) -> bool:
        """Whether the matrix has a product with a fused gated activation."""
        return len(self._blocks) == 1 and self._functions.gated_linear is not None

    def gated_product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, *, gelu: bool) -> torch.Tensor:
        """Product with a fused gated activation, see ``GatedLinear``."""
        return self._functions.gated_linear(x_TI, self.packed, bias_O, gelu=gelu)

    def columns(self, begin: int, end: int) -> torch.Tensor:
        """Columns ``begin:end`` of the matrix as ``product`` uses it, (end - begin, outputs), from products with unit vectors."""
        units = torch.zeros(end - begin, self.num_inputs)
        units[torch.arange(end - begin), torch.arange(begin, end)] = 1
        outs = (
            block.functions.linear(units.to(block.packed.device, block.packed.exact_dtype), block.packed)
            for block in self._blocks
        )
        return torch.cat(list(outs), dim=1)

    def calls(self) -> Iterator[FunctionCall]:
        """Function calls of products with this matrix."""
        yield from self.product_calls()

    def product_calls(self) -> Iterator[LinearCall]:
        """Function calls of products with this matrix, one for each block."""
        for block in self._blocks:
            yield LinearCall(
                target=block.functions.target,
                quantization=block.functions.quantization,
                outputs=block.rows[1] - block.rows[0],
                inputs=self.num_inputs,
            )

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(block.packed.nbytes for block in self._blocks if block.packed is not None)
