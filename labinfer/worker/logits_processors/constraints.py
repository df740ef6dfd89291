"""Constraints: logits processors that bias, allow or forbid tokens."""

from __future__ import annotations

import torch

from labinfer.worker.logits_processors.processor import SampledRow

NEVER = float("-inf")


def logit_bias(logits_V: torch.Tensor, bias: dict[int, float], biases_2N: torch.Tensor) -> None:
    """Add a bias to the logits of token ids, as in OpenAI's API."""
    token_ids_N, biases_N = biases_2N  # float32 holds ids up to 2**24
    logits_V[token_ids_N.long()] += biases_N


def allowed_token_ids(logits_V: torch.Tensor, token_ids: list[int], allowed_N: torch.Tensor) -> None:
    """Forbid all tokens but ``token_ids``."""
    kept_N = logits_V[allowed_N]
    logits_V.fill_(NEVER)
    logits_V[allowed_N] = kept_N


def bad_words(logits_V: torch.Tensor, words: list[list[int]], row: SampledRow) -> None:
    """Forbid the last token of each word whose other tokens have just been generated."""
    for *begin, last in words:
        if not begin or row.output_ids[-len(begin) :] == begin:
            logits_V[last] = NEVER


def min_tokens(logits_V: torch.Tensor, value: list, row: SampledRow) -> None:
    """``[count, ids]``: forbid ``ids`` until the answer has ``count`` tokens."""
    count, token_ids = value
    if len(row.output_ids) < count:
        for token_id in token_ids:  # few; an index tensor would be a copy to an accelerator
            logits_V[token_id] = NEVER


logit_bias.numbers = lambda bias, row: torch.tensor([[*bias], [*bias.values()]], dtype=torch.float32)
allowed_token_ids.numbers = lambda token_ids, row: torch.tensor(token_ids, dtype=torch.int64)
