"""Bounds of thoughts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch

from labinfer.worker.logits_processors.registry import SampledRow, processor

Count = Annotated[int, msgspec.Meta(ge=0)]
Mark = list[Count]
NEVER = float("-inf")


@processor("thinking_budget")
def thinking_budget(logits_V: torch.Tensor, value: Any, row: SampledRow) -> None:
    """``[count, open, close]``: a thought of so many tokens is closed. The marks are token ids; the first one is empty where the
    prompt has opened the thought.
    """
    count, opening, closing = msgspec.convert(value, tuple[Count, Mark, Annotated[Mark, msgspec.Meta(min_length=1)]])
    closing_N = logits_V[closing]  # refuses what is outside the vocabulary
    output = row.output_ids
    begin = _mark_end(opening, output)
    if begin is None or len(output) - begin < count or _mark_end(closing, output[begin:]) is not None:
        return
    written = next(
        length for length in range(len(closing) - 1, -1, -1) if output[len(output) - length :] == closing[:length]
    )
    logits_V.fill_(NEVER)
    logits_V[closing[written]] = closing_N[written]


def _mark_end(mark: list[int], token_ids: list[int]) -> int | None:
    """End of the first occurrence of a mark; None where there is none."""
    for begin in range(len(token_ids) - len(mark) + 1):
        if token_ids[begin : begin + len(mark)] == mark:
            return begin + len(mark)
    return None
