"""``BySequence``: dispatch of a function to one implementation per sequence of the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.attention_batch import AttentionBatch


class BySequence:
    """A function of rows, a cache and a batch that picks an implementation for each sequence by the sequence's number of new
    tokens. The result for a sequence does not depend on the other sequences of the batch.

    Args:
        choose: called with the number of new tokens of a sequence and the arguments after ``batch``.
    """

    def __init__(self, choose: Callable[..., Callable[..., torch.Tensor]]):
        self._choose = choose

    def __call__(self, rows_T: torch.Tensor, cache: object, batch: AttentionBatch, *others: object) -> torch.Tensor:
        if batch.has_single_rows(rows_T):
            return self._choose(1, *others)(rows_T, cache, batch, *others)
        choices: dict[Callable[..., torch.Tensor], list[int]] = {}
        for index in range(len(batch.context_lens)):
            count = batch.row_ptr[index + 1] - batch.row_ptr[index]
            choices.setdefault(self._choose(count, *others), []).append(index)
        if len(choices) == 1:
            return next(iter(choices))(rows_T, cache, batch, *others)
        out_T = None
        for function, indices in choices.items():
            own_R, part = batch.part(indices)
            part_R = function(rows_T[own_R], cache, part, *others)
            if out_T is None:
                out_T = part_R.new_empty(len(rows_T), *part_R.shape[1:])
            out_T[own_R] = part_R
        return out_T
