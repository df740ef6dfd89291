"""The vocabulary at both ends of the model, cut over the ranks of a stage by token id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from labinfer.comm.spmd.topology import shard_range
from labinfer.functions.calls import FunctionCall
from labinfer.functions.head_preview import GROUP
from labinfer.functions.packed_weight import export_packed, import_packed
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.matrix import Matrix
from labinfer.weights.codes import CodeForm
from labinfer.weights.slices import MatrixSlice, Range, WeightSlice

HEAD = "lm_head"
PREVIEW = "preview"
"""Name of a head's preview among what is kept of its packed weights."""


class VocabParallelEmbedding(Matrix):
    """A matrix with a row for each token: a table at the model's beginning, a projection to logits at its end.

    Args:
        tied: name of the matrix in the checkpoint where that is another layer's.
        is_head: whether it is a head that has a preview, where ``ctx`` asks for one.
        columns: range of the hidden size that is held; None for all.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ctx: StageContext,
        tied: str | None = None,
        *,
        is_head: bool = False,
        columns: Range | None = None,
    ):
        self._hidden_size, self._columns = hidden_size, columns or (0, hidden_size)
        ranges = shard_range(vocab_size, ctx.tp.size)
        begin, end = ranges[ctx.tp.rank]
        super().__init__(end - begin, self._columns[1] - self._columns[0], "vocabulary", ctx)
        self._vocab_size, self._tied, self._tp = vocab_size, tied, ctx.tp
        self._ranges, self._begin, self._end = ranges, begin, end
        self._has_preview, self._preview = is_head and ctx.head_preview, None

    def choose_forms(self, prefix: str, form: Callable[[str], CodeForm | None]) -> None:
        is_table = self._tied is not None or prefix != HEAD
        if not (is_table and self._has_preview):  # the preview of a table that is the head as well is one of its values
            super().choose_forms(prefix, form)

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Hidden states, (T,) → (T, D). The sum over the ranks is exact: all but the one that holds the id give 0."""
        return self._tp.all_reduce(self._functions.embedding(token_ids_T, self.packed, self._begin))

    def calls(self) -> Iterator[FunctionCall]:
        """None: looking up is not timed, and the product is the call of the model that has it as its head."""
        return iter(())

    def logits(self, hidden_BD: torch.Tensor, *, largest_only: bool = False) -> torch.Tensor | None:
        """(B, D) → (B, V) on tp rank 0, None on the others.

        Args:
            largest_only: logits that cannot be a row's largest may be -inf.
        """
        if largest_only and self._preview is not None:
            slice_BV = self._functions.largest_logits(hidden_BD, self.packed, self._preview)
        else:
            slice_BV = self.product(hidden_BD)
        return self._tp.gather_columns(slice_BV, [end - begin for begin, end in self._ranges])

    def pack(self) -> None:
        if self._has_preview and self.weight is not None:
            self._preview = self._functions.make_preview(self.weight.detach())
        super().pack()

    @property
    def packing(self) -> str:
        return super().packing + f" with a preview by {GROUP}" * self._has_preview

    def export_packed(self) -> dict[str, Any] | None:
        state = super().export_packed()
        if state is None or self._preview is None:
            return state
        return state | (export_packed(self._preview, PREVIEW) or {})

    def import_packed(self, state: Mapping[str, Any]) -> None:
        if PREVIEW in state:
            self._preview = import_packed(state, PREVIEW)
        super().import_packed(state)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (self._preview.nbytes if self._preview is not None else 0)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield MatrixSlice(
            name=self._tied or prefix,
            outputs=self._vocab_size,
            inputs=self._hidden_size,
            rows=(self._begin, self._end),
            columns=self._columns,
            destination=self.memory(0, self.num_outputs),
        )
