"""Penalties: logits processors that make tokens of the prompt or answer less likely."""

from __future__ import annotations

from collections import Counter

import torch


def repetition_penalty(logits_V: torch.Tensor, penalty: float, seen_N: torch.Tensor) -> None:
    """Penalize tokens of prompt and answer (Keskar et al. 2019, arXiv:1909.05858), as in Transformers."""
    logits_N = logits_V[seen_N]
    logits_V[seen_N] = torch.where(logits_N < 0, logits_N * penalty, logits_N / penalty)


def presence_penalty(logits_V: torch.Tensor, penalty: float, seen_N: torch.Tensor) -> None:
    """Penalize each token of the answer once, as in OpenAI's API."""
    logits_V[seen_N] -= penalty


def frequency_penalty(logits_V: torch.Tensor, penalty: float, counts_N2: torch.Tensor) -> None:
    """Penalize each token of the answer once per occurrence, as in OpenAI's API."""
    logits_V[counts_N2[:, 0]] -= penalty * counts_N2[:, 1]


repetition_penalty.numbers = lambda penalty, row: torch.tensor([*{*row.token_ids}], dtype=torch.int64)
presence_penalty.numbers = lambda penalty, row: torch.tensor([*{*row.output_ids}], dtype=torch.int64)
frequency_penalty.numbers = lambda penalty, row: torch.tensor([*Counter(row.output_ids).items()]).long().view(-1, 2)
