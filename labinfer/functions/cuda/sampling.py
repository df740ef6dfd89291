"""Draws of several rows at once: a card takes about as long for all of them as for one, and is waited for once.

The tokens are those of ``functions.reference.sampling``.
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
"""Tokens among which candidates are looked for: nearly always they are all there."""
ROW_BYTES = 16 << 20
"""Logits of rows at a time, in float64, of which some copies are there at once."""
UNDECIDED = -1
"""Placeholder for a token, where candidates may be missing."""


@dataclass(frozen=True, kw_only=True)
class DrawTensors:
    """Numbers of some draws as columns, (R, 1); see ``Draw``."""

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
    """The token of each draw, as ``Sample`` has it."""
    vocab_size, cut, uncut, undecided = logits_BV.shape[1], [], [], []
    rows_each = max(1, ROW_BYTES // (vocab_size * torch.float64.itemsize))
    for i, draw in enumerate(draws):
        params = draw.params
        is_cut = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        # The sum over the k largest, which top-p is a part of, takes all of them.
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
    """A token of each row (R), of logits over the temperature."""
    ids_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    return (scaled_RV + gumbel_noise(draws.seed, draws.position, ids_V)).argmax(dim=1)


def draw_from_likeliest(scaled_RV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """A token of each row (R), of logits over the temperature; ``UNDECIDED`` where not all candidates are among the likeliest."""
    count = min(LIKELIEST, scaled_RV.shape[1])
    values_RN, ids_RN = scaled_RV.topk(count)
    for keys_RN, falling in ((ids_RN, False), (None, True)):  # falling, equal ones by id
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
    # Candidates are the first in this order, and none is missing if those behind them are there with all their equals.
    last_R1 = (is_candidate_RN.sum(1, keepdim=True) - 1).clamp(min=0)  # there are none where the largest is no number
    least_R1 = values_RN.gather(1, last_R1)
    return tokens_R.masked_fill((least_R1 <= values_RN[:, -1:]).squeeze(1), UNDECIDED)
