"""Dispatch of a function to one of its implementations: by the rows of the batch, or per sequence by its new tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from labinfer.functions.attention_batch import AttentionBatch

BATCH_BUCKETS = (1, 8, 32, 128)
"""Upper bounds of the buckets of batch sizes (rows, i.e. tokens), except the last: one request, a few, many, small prompts, prompts."""


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


class DispatchByBatchSize:
    """A function with an implementation for each bucket of batch sizes; dimension 0 of the first argument is the batch size.

    Args:
        calls: one for each of ``BATCH_BUCKETS``, and one for larger batches.
    """

    def __init__(self, calls: Sequence[Callable]):
        self._calls = tuple(calls)

    def __call__(self, argument: torch.Tensor, /, *others, **named):
        return self._calls[bisect_left(BATCH_BUCKETS, argument.shape[0])](argument, *others, **named)


def by_new_tokens(calls: Sequence[Callable]) -> BySequence:
    """A function that chooses an implementation for each sequence by its number of new tokens.

    Args:
        calls: one for each of ``BATCH_BUCKETS``, and one for more tokens.
    """
    return BySequence(lambda num_new, *others: calls[bisect_left(BATCH_BUCKETS, num_new)])
