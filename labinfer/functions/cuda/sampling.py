"""Sampling of all rows of a batch at once, with a single synchronization with the GPU.

Drawn tokens equal those of ``functions.reference.sampling``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labinfer.functions.draw import Draw
from labinfer.functions.reference.sampling import argmax, gumbel_noise, integer_weights
from labinfer.functions.reference.sampling import sample as sample_one_by_one

LIKELIEST = 1024
"""Number of the likeliest tokens that are searched first; they nearly always include all candidates."""
ROW_BYTES = 16 << 20
"""Maximum bytes of float64 logits processed at a time; several copies exist at once."""
UNDECIDED = -1
"""Placeholder token of a row whose candidates may be incomplete."""


@dataclass(frozen=True, kw_only=True)
class DrawTensors:
    """Parameters of the draws as columns, (R, 1); see ``Draw``."""

    seed: torch.Tensor
    position: torch.Tensor
    top_k: torch.Tensor
    """Number of the largest logits to keep; the size of the vocabulary keeps all."""
    temperature: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor

    @classmethod
    def make(cls, draws: Sequence[Draw], vocab_size: int, device: torch.device) -> DrawTensors:
        pairs = [(draw.position, draw.params) for draw in draws]
        whole = [(p.seed, at, p.top_k if 0 < p.top_k < vocab_size else vocab_size) for at, p in pairs]
        parts = [(p.temperature, p.top_p, math.log(p.min_p) if p.min_p > 0.0 else -math.inf) for _, p in pairs]
        seed, position, top_k = torch.tensor(whole, device=device).split(1, dim=1)
        temperature, top_p, log_min_p = torch.tensor(parts, dtype=torch.float64, device=device).split(1, dim=1)
        return cls(
            seed=seed,
            position=position,
            top_k=top_k,
            temperature=temperature,
            top_p=top_p,
            log_min_p=log_min_p,
        )


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample the token of each draw; see ``Sample``."""
    vocab_size, cut, uncut, undecided = logits_BV.shape[1], [], [], []
    rows_each = max(1, ROW_BYTES // (vocab_size * torch.float64.itemsize))
    for i, draw in enumerate(draws):
        params = draw.params
        is_cut = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        # Top-p is a fraction of the probability of the top-k tokens, whose sum needs all of them.
        is_wide = params.top_p < 1.0 and LIKELIEST < params.top_k < vocab_size
        (undecided if params.typical_p < 1.0 or is_wide else cut if is_cut else uncut).append(i)
    tokens: dict[int, int] = {}
    for indices, draw_rows in ((cut, draw_from_likeliest), (uncut, draw_from_all)):
        for begin in range(0, len(indices), rows_each):
            chosen = indices[begin : begin + rows_each]
            logits_RV = logits_BV[[draws[i].row for i in chosen]]
            tensors = DrawTensors.make([draws[i] for i in chosen], vocab_size, logits_BV.device)
            drawn_R = draw_rows(logits_RV.double() / tensors.temperature, tensors)
            largest_R = argmax(logits_RV)
            is_number_R = logits_RV.gather(1, largest_R.unsqueeze(1)).squeeze(1).isfinite()
            tokens |= zip(chosen, torch.where(is_number_R, drawn_R, largest_R).tolist(), strict=True)
    undecided += [i for i, token in tokens.items() if token == UNDECIDED]
    tokens |= zip(undecided, sample_one_by_one(logits_BV, [draws[i] for i in undecided]), strict=True)
    return [tokens[i] for i in range(len(draws))]


def draw_from_all(scaled_RV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """Draw a token of each row (R) from the whole vocabulary, by the temperature-scaled logits."""
    ids_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    return (scaled_RV + gumbel_noise(draws.seed, draws.position, ids_V)).argmax(dim=1)


def draw_from_likeliest(scaled_RV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """Draw a token of each row (R) from the likeliest tokens of the temperature-scaled logits; ``UNDECIDED`` if they may not include all
    candidates."""
    count = min(LIKELIEST, scaled_RV.shape[1])
    values_RN, ids_RN = scaled_RV.topk(count)
    for keys_RN, falling in ((ids_RN, False), (None, True)):  # descending, ties by id
        order_RN = (values_RN if keys_RN is None else keys_RN).argsort(dim=1, descending=falling, stable=True)
        values_RN, ids_RN = values_RN.gather(1, order_RN), ids_RN.gather(1, order_RN)
    largest_R1 = values_RN[:, :1]
    in_top_k_RN = torch.arange(count, device=ids_RN.device) < draws.top_k
    weights_RN = integer_weights(values_RN, largest_R1)
    all_R1 = integer_weights(scaled_RV, largest_R1).sum(1, keepdim=True)
    sum_R1 = torch.where(draws.top_k == scaled_RV.shape[1], all_R1, (weights_RN * in_top_k_RN).sum(1, keepdim=True))
    before_RN = weights_RN.cumsum(1) - weights_RN
    is_candidate_RN = in_top_k_RN & (values_RN >= largest_R1 + draws.log_min_p)
    is_candidate_RN &= (draws.top_p >= 1.0) | (before_RN.double() < draws.top_p * sum_R1.double())
    noisy_RN = values_RN + gumbel_noise(draws.seed, draws.position, ids_RN)
    best_R1 = noisy_RN.masked_fill(~is_candidate_RN, -math.inf).argmax(1, keepdim=True)
    tokens_R = ids_RN.gather(1, best_R1).squeeze(1)
    if count == scaled_RV.shape[1]:
        return tokens_R
    # Candidates come first in descending order. All are included if a token with a smaller logit than theirs is, too.
    last_R1 = (is_candidate_RN.sum(1, keepdim=True) - 1).clamp(min=0)  # no candidates if the largest logit is NaN
    least_R1 = values_RN.gather(1, last_R1)
    return tokens_R.masked_fill((least_R1 <= values_RN[:, -1:]).squeeze(1), UNDECIDED)
