"""Routed experts of a rank: a range of columns of every expert, or whole experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn

from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape, PackedExperts
from labinfer.models.families.layers.expert_biases import ClampedGateConfig, ExpertBiases
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.segments import SegmentSum, Shard, without_segment
from labinfer.models.layers.sharding import shard_columns, shard_experts
from labinfer.weights.codes import Codes, QuantLayout, Range
from labinfer.weights.slices import MatrixSlice, MatrixStack, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter

Projection = Literal["gate_proj", "up_proj", "down_proj"]


def expert_shard(num_experts: int, columns: int, ctx: StageContext) -> Shard:
    """Function of (tensor-parallel size, rank) that returns the rank's range of the experts, or of the columns of every expert."""
    return partial(shard_experts, num_experts) if ctx.experts == "whole" else partial(shard_columns, columns)


class RoutedExperts(WeightedModule):
    """Routed gated MLPs of one shape; the caller sums their partial results over the ranks.

    Experts are loaded and packed one by one, so a layer's unpacked experts are never in memory together. If the checkpoint stores all of
    them quantized in one ``QuantLayout``, they stay quantized; otherwise each is dequantized.

    Args:
        num_experts: experts of the layer, over all ranks.
        columns: intermediate size of an expert, over all ranks.
        gate: clamped activation; None for SiLU or GELU.
        may_be_input_major: see ``MatrixStack``.
        gelu: whether the activation is GELU instead of SiLU.
        stacked_apart: see ``MixtureConfig``.
        part: range of the sharded dimension to hold, see ``expert_shard``; None for the range of this rank.
    """

    def __init__(
        self,
        num_experts: int,
        columns: int,
        hidden_size: int,
        ctx: StageContext,
        gate: ClampedGateConfig | None = None,
        *,
        gelu: bool = False,
        may_be_input_major: bool = False,
        stacked_apart: bool = False,
        part: Range | None = None,
    ):
        super().__init__()
        self._functions = self._value_functions = ctx.functions.experts
        self._code_functions = ctx.functions.coded_experts
        self._num_experts, self._all_columns = num_experts, columns
        self._hidden_size, self._dtype = hidden_size, ctx.dtype
        part = part or expert_shard(num_experts, columns, ctx)(ctx.tp.size, ctx.tp.rank)
        self._range, self._columns = (part, (0, columns)) if ctx.experts == "whole" else ((0, num_experts), part)
        self._may_be_input_major = may_be_input_major
        self._is_transposed, self.biases, self._gelu = gate is not None and gate.has_biases, None, gelu
        if gate is not None:
            sizes, parts = (num_experts, columns, hidden_size), (self._range, self._columns)
            self.biases = ExpertBiases(gate, sizes, *parts, counts=self._columns[0] == 0)
        self._stacked_apart = stacked_apart
        self.packed: PackedExperts | None = None
        self._codes: tuple[Codes, Codes] | None = None
        """Memory for loading quantized experts; replaces ``gate_up`` and ``down``."""
        self.use_float_values()

    def use_float_values(self) -> None:
        device = None if self._codes is None else self._codes[1].device
        self._functions, self._codes = self._value_functions, None
        self.gate_up = empty_parameter(2 * self._width, self._hidden_size, dtype=self._dtype, device=device)
        self.down = empty_parameter(self._hidden_size, self._width, dtype=self._dtype, device=device)

    @property
    def _width(self) -> int:
        """Columns of each expert on this rank."""
        return self._columns[1] - self._columns[0]

    @property
    def num_parameters(self) -> int:
        """Parameters of all experts of this rank, without biases."""
        return (self._range[1] - self._range[0]) * 3 * self._width * self._hidden_size

    @property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[Codes, Codes]:
        """Memory for loading one expert: gate and up, and down."""
        return self._codes or (self.gate_up.detach(), self.down.detach())

    def forward(self, x_TD: torch.Tensor, ids_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
        """(T, D) → (T, D): this rank's summand of the weighted sum over each token's experts."""
        return self._functions.experts(x_TD, ids_TA, weights_TA, self._mlps)

    @cached_property
    def _mlps(self) -> ExpertMLPs:
        """Argument of the experts' function; built at the first step, when experts and biases are packed."""
        gate = None if self.biases is None else self.biases.gate
        return ExpertMLPs(self.packed, self._range[0], gate, self._gelu)

    def experts_calls(self, num_chosen: int) -> Iterator[ExpertsCall]:
        """Description of this layer's call of the experts' function, for measurements, if this rank holds any experts.

        Args:
            num_chosen: experts per token.
        """
        call = ExpertsCall(
            target=self._functions.target,
            quantization=self._functions.quantization,
            num_experts=self._range[1] - self._range[0],
            all_experts=self._num_experts,
            num_chosen=num_chosen,
            hidden_size=self._hidden_size,
            columns=self._width,
        )
        if call.elements:
            yield call

    def slices(self, prefix: str) -> Iterator[MatrixSlice]:
        for expert in range(*self._range):
            yield from self._expert_slices(prefix, expert)

    def choose_forms(self, prefix: str, form: Callable[[str], QuantLayout | None]) -> None:
        forms = {form(part.name) for part in self.slices(prefix)}
        if len(forms) == 1 and (chosen := forms.pop()) is not None:
            self._functions = self._code_functions[chosen.quantization]
            self._codes = self._empty_codes(chosen, self.down.device)
            self.gate_up = self.down = None

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        if self._codes is not None:
            self._codes = self._empty_codes(self._codes[0].form, device)

    def check_room(self) -> None:
        self._make()  # still on the meta device

    def _empty_codes(self, form: QuantLayout, device: torch.device) -> tuple[Codes, Codes]:
        gate_up = Codes.empty(form, 2 * self._width, (0, self._hidden_size), device)
        return gate_up, Codes.empty(form, self._hidden_size, self._columns, device)

    def load(self, prefix: str, read: Callable[[WeightSlice], None]) -> None:
        packed = self._make()
        pack = packed.pack if self._codes is None else packed.pack_codes
        for expert in range(*self._range):
            for part in self._expert_slices(prefix, expert):
                read(part)
            pack(expert - self._range[0], *self._memory)
        self._take(packed)

    def pack(self) -> None:
        """Allocate the memory of the packed experts without loading weights, so that its size is known."""
        self._take(self._make())

    @property
    def packing(self) -> str:
        return self._functions.packing

    def export_packed(self) -> dict[str, Any] | None:
        return None if self.packed.data_EB is None else {"data_EB": self.packed.data_EB}

    def import_packed(self, state: Mapping[str, Any]) -> None:
        self._take(self._make(state["data_EB"]))

    def _take(self, packed: PackedExperts) -> None:
        self.packed, self._codes, self.gate_up, self.down = packed, None, None, None

    def _make(self, data_EB: torch.Tensor | None = None) -> PackedExperts:
        _, down = self._memory
        form, count = down.form if isinstance(down, Codes) else None, self._range[1] - self._range[0]
        shape = ExpertShape(count, self._hidden_size, self._columns, self._dtype, form)
        if data_EB is None:
            return self._functions.make_experts(shape, down.device)
        return self._functions.make_experts(shape, data_EB.device, data_EB=data_EB)

    def _expert_slices(self, prefix: str, expert: int) -> Iterator[MatrixSlice]:
        """Gate, up and down slices of one expert, from matrices of its own or from stacked tensors of all experts. Empty on a rank without
        columns."""
        prefix, hidden_size, width, full = without_segment(prefix), self._hidden_size, self._width, self._all_columns
        gate_up, down = self._memory
        if not width:
            return

        def part(name: Projection, destination: torch.Tensor | Codes, stack: str, first_row: int) -> MatrixSlice:
            is_down = name == "down_proj"
            outputs, inputs = (hidden_size, full) if is_down else (full, hidden_size)
            return MatrixSlice(
                name=f"{prefix}.{expert}.{name}",
                outputs=outputs,
                inputs=inputs,
                rows=(0, outputs) if is_down else self._columns,
                columns=self._columns if is_down else (0, inputs),
                destination=destination,
                stack=MatrixStack(
                    name=f"{prefix}.{stack}",
                    shape=(self._num_experts, outputs if is_down or self._stacked_apart else 2 * outputs, inputs),
                    index=expert,
                    first_row=first_row,
                    is_transposed=self._is_transposed,
                    may_be_input_major=self._may_be_input_major,
                ),
            )

        gate, up = (
            gate_up.rows(begin, begin + width) if isinstance(gate_up, Codes) else gate_up[begin : begin + width]
            for begin in (0, width)
        )
        if self._stacked_apart:
            yield part("gate_proj", gate, "gate_proj", 0)
            yield part("up_proj", up, "up_proj", 0)
        else:
            yield part("gate_proj", gate, "gate_up_proj", 0)
            yield part("up_proj", up, "gate_up_proj", full)
        yield part("down_proj", down, "down_proj", 0)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (self.packed.nbytes if self.packed is not None else 0)


class SegmentedExperts(nn.Module):
    """Routed experts of a reproducible run, cut into segments (see ``SegmentSum``). The arguments are those of ``RoutedExperts``."""

    def __init__(self, num_experts: int, columns: int, hidden_size: int, ctx: StageContext, *others: Any, **named: Any):
        super().__init__()
        self._sum = SegmentSum(expert_shard(num_experts, columns, ctx), ctx.tp)
        self.segments = nn.ModuleList(
            RoutedExperts(num_experts, columns, hidden_size, ctx, *others, **named, part=part)
            for _, part in self._sum.segments
        )

    def forward(self, x_TD: torch.Tensor, ids_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
        """(T, D) → (T, D): the weighted sum over each token's experts, on all ranks."""
        parts = [segment(x_TD, ids_TA, weights_TA) for segment in self.segments]
        return self._sum.add(x_TD.new_empty(x_TD.shape), *parts)

    def experts_calls(self, num_chosen: int) -> Iterator[ExpertsCall]:
        """See ``RoutedExperts.experts_calls``."""
        for segment in self.segments:
            yield from segment.experts_calls(num_chosen)


def make_routed_experts(
    num_experts: int, columns: int, hidden_size: int, ctx: StageContext, *others: Any, **named: Any
) -> RoutedExperts | SegmentedExperts:
    """Make this rank's experts, with the arguments of ``RoutedExperts``. The caller passes their result to ``StageContext.sum_partials``."""
    make = RoutedExperts if ctx.row_parallel is None else SegmentedExperts
    return make(num_experts, columns, hidden_size, ctx, *others, **named)
