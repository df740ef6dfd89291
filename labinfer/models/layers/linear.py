"""Tensor-parallel linear layers (Shoeybi et al. 2019, arXiv:1909.08053).

Column-parallel layers split the outputs, row-parallel layers the inputs. A column-parallel layer followed by a row-parallel one needs one
all-reduce. Shards may be unequal: see ``layers/sharding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from labinfer.functions.functions import MatrixKind
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.matrix import Matrix
from labinfer.models.layers.sharding import HeadShard
from labinfer.weights.slices import MatrixSlice, Range, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import empty_parameter

Activation = Literal["silu", "gelu"]
"""Activation of a gated MLP; ``gelu`` is the tanh approximation."""


class MergedColumnParallelLinear(Matrix):
    """Several projections of one input, split by output columns and held as one matrix.

    A checkpoint may store the projections separately, or fused into one matrix with their rows in order: see ``StageContext.names``.

    Args:
        parts: name, full number of outputs and this rank's range of outputs, for each projection. A projection with
            several ranges on this rank is listed once for each range.
        bias: whether the checkpoint has biases for the projections.
        kind: selects the quantization.
    """

    def __init__(
        self,
        in_features: int,
        parts: list[tuple[str, int, Range]],
        bias: bool,
        ctx: StageContext,
        kind: MatrixKind = "layer",
    ):
        out_features = sum(end - begin for _, _, (begin, end) in parts)
        super().__init__(out_features, in_features, kind, ctx)
        self._parts = parts
        self._fused = ctx.names.fused.get(tuple(name for name, _, _ in parts))
        self.bias = empty_parameter(out_features, dtype=ctx.dtype) if bias else None

    def forward(self, x_TD: torch.Tensor, gate: Activation | None = None) -> torch.Tensor:
        """(T, D) → (T, O), or (T, O / 2) with the fused activation ``gate``, which requires ``can_gate``."""
        if gate is not None:
            return self.gated_product(x_TD, self.bias, gelu=gate == "gelu")
        return self.product(x_TD, self.bias)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent = prefix.rpartition(".")[0]
        all_outputs = sum(outputs for _, outputs, _ in self._parts)
        row = offset = 0  # row of this rank's matrix, and of the checkpoint's fused matrix
        for name, outputs, (begin, end) in self._parts:
            here = slice(row, row + end - begin)
            if self._fused is None:
                stored, num_rows, rows = f"{parent}.{name}", outputs, (begin, end)
            else:
                stored, num_rows, rows = f"{parent}.{self._fused}", all_outputs, (offset + begin, offset + end)
            yield MatrixSlice(
                name=stored,
                outputs=num_rows,
                inputs=self.num_inputs,
                rows=rows,
                columns=(0, self.num_inputs),
                destination=self.memory(row, row + end - begin),
            )
            if self.bias is not None:
                yield TensorSlice(name=f"{stored}.bias", shape=(num_rows,), ranges=(rows,), destination=self.bias[here])
            row, offset = row + end - begin, offset + outputs


class QKVParallelLinear(MergedColumnParallelLinear):
    """QKV projection of this rank's heads, followed by their output gates, if any.

    Args:
        kv_names: names of the key and value projections in the checkpoint, which may be equal; empty without keys and values.
        output_gate: whether each head's query rows in the checkpoint's ``q_proj`` are followed by its gate rows.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        shard: HeadShard,
        bias: bool,
        ctx: StageContext,
        kv_names: tuple[str, ...] = ("k_proj", "v_proj"),
        output_gate: bool = False,
    ):
        query = (shard.query[0] * head_size, shard.query[1] * head_size)
        kv = (shard.kv[0] * head_size, shard.kv[1] * head_size)
        queries, gates = [("q_proj", num_heads * head_size, query)], []
        if output_gate:
            heads = [head * head_size for head in range(2 * shard.query[0], 2 * shard.query[1])]
            rows = [("q_proj", 2 * num_heads * head_size, (begin, begin + head_size)) for begin in heads]
            queries, gates = rows[0::2], rows[1::2]
        keys_and_values = [(name, num_kv_heads * head_size, kv) for name in kv_names]
        parts = [*queries, *keys_and_values, *gates]
        super().__init__(hidden_size, parts, bias, ctx)
        self._has_kv = bool(kv_names)

    def unread(self, prefix: str) -> Iterator[str]:
        if not self._has_kv:
            parent = prefix.rpartition(".")[0]
            yield from (f"{parent}.{name}" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


class ReplicatedLinear(Matrix):
    """A small projection that is replicated on every rank, and not quantized unless ``kind`` says otherwise.

    Args:
        outputs: range of the outputs that are held; None for all.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: StageContext,
        kind: MatrixKind = "exact",
        outputs: Range | None = None,
    ):
        self._all_outputs, self._outputs = out_features, outputs or (0, out_features)
        super().__init__(self._outputs[1] - self._outputs[0], in_features, kind, ctx)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.product(x_TD)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield MatrixSlice(
            name=prefix,
            outputs=self._all_outputs,
            inputs=self.num_inputs,
            rows=self._outputs,
            columns=(0, self.num_inputs),
            destination=self.memory(0, self.num_outputs),
        )


def row_parallel(
    in_features: int, shard: Callable[[int, int], Range], out_features: int, bias: bool, ctx: StageContext
) -> Any:
    """Make a ``RowParallelLinear``, or the layer that ``ctx.row_parallel`` makes in its place.

    Args:
        shard: (tensor-parallel size, rank) → range of the inputs of that rank.
    """
    if ctx.row_parallel is not None:
        return ctx.row_parallel(in_features, shard, out_features, bias, ctx)
    return RowParallelLinear(in_features, shard(ctx.tp.size, ctx.tp.rank), out_features, bias, ctx)


class RowParallelLinear(Matrix):
    """A projection split by input columns; an all-reduce sums the partial results. Layers make it with ``row_parallel``.

    Args:
        columns: this rank's range of the inputs.
    """

    def __init__(self, in_features: int, columns: Range, out_features: int, bias: bool, ctx: StageContext):
        super().__init__(out_features, columns[1] - columns[0], "layer", ctx)
        self._in_features, self._columns, self._tp = in_features, columns, ctx.tp
        self.bias = empty_parameter(out_features, dtype=ctx.dtype) if bias else None

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        out_TD = self._tp.all_reduce(self.product(x_TF))
        return out_TD if self.bias is None else out_TD + self.bias  # after the all-reduce, so that it is added once

    def partial(self, x_TF: torch.Tensor) -> torch.Tensor:
        """This rank's summand of ``forward``; the first rank's includes the bias."""
        return self.product(x_TF, self.bias if self._tp.rank == 0 else None)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        outputs = self.num_outputs
        yield MatrixSlice(
            name=prefix,
            outputs=outputs,
            inputs=self._in_features,
            rows=(0, outputs),
            columns=self._columns,
            destination=self.memory(0, outputs),
        )
        if self.bias is not None:
            yield TensorSlice(name=f"{prefix}.bias", shape=(outputs,), destination=self.bias)
