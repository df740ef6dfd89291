"""thinking_budget: logits processor that limits the tokens of reasoning before the answer."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch

from labinfer.worker.logits_processors.processor import SampledRow

Count = Annotated[int, msgspec.Meta(ge=0)]
Mark = list[Count]
Budget = tuple[Count, Mark, Annotated[Mark, msgspec.Meta(min_length=1)], list[Count]]
NEVER = float("-inf")


def thinking_budget(logits_V: torch.Tensor, value: Any, row: SampledRow) -> None:
    """``[count, open, close, calls]``: force the closing delimiter once the reasoning has ``count`` tokens. Delimiters
    are lists of token ids; ``open`` is empty if the prompt has opened the reasoning. A token of ``calls`` also ends the
    reasoning: it begins a tool call, which must not be cut."""
    count, opening, closing, calls = msgspec.convert(value, Budget)
    closing_logits = [logits_V[token] for token in closing]  # IndexError for ids outside of the vocabulary
    output = row.output_ids
    begin = _mark_end(opening, output)
    if begin is None or len(output) - begin < count:
        return
    reasoning = output[begin:]
    if _mark_end(closing, reasoning) is not None or any(token in reasoning for token in calls):
        return
    written = next(
        length for length in range(len(closing) - 1, -1, -1) if reasoning[len(reasoning) - length :] == closing[:length]
    )
    kept = closing_logits[written].clone()
    logits_V.fill_(NEVER)
    closing_logits[written].copy_(kept)


def _mark_end(mark: list[int], token_ids: list[int]) -> int | None:
    """Index in ``token_ids`` after the first occurrence of ``mark``; None if there is none."""
    end = len(mark)
    while token_ids[end - len(mark) : end] != mark:
        try:
            end = token_ids.index(mark[0], end - len(mark) + 1) + len(mark)
        except ValueError:
            return None
    return end
