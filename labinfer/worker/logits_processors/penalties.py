"""Penalties: logits processors that make tokens of the prompt or answer less likely."""

from __future__ import annotations

from collections import Counter

import torch

from labinfer.worker.logits_processors.processor import SampledRow


def repetition_penalty(logits_V: torch.Tensor, penalty: float, row: SampledRow) -> None:
    """Penalize tokens of prompt and answer (Keskar et al. 2019, arXiv:1909.05858), as in Transformers."""
    seen_N = torch.tensor(list(set(row.token_ids)), dtype=torch.int64, device=logits_V.device)
    logits_N = logits_V[seen_N]
    logits_V[seen_N] = torch.where(logits_N < 0, logits_N * penalty, logits_N / penalty)


def presence_penalty(logits_V: torch.Tensor, penalty: float, row: SampledRow) -> None:
    """Penalize each token of the answer once, as in OpenAI's API."""
    logits_V[torch.tensor(list(set(row.output_ids)), dtype=torch.int64, device=logits_V.device)] -= penalty


def frequency_penalty(logits_V: torch.Tensor, penalty: float, row: SampledRow) -> None:
    """Penalize each token of the answer once per occurrence, as in OpenAI's API."""
    counts = Counter(row.output_ids)
    pairs_2N = torch.tensor([list(counts), list(counts.values())], dtype=torch.int64, device=logits_V.device)
    token_ids_N, counts_N = pairs_2N
    logits_V[token_ids_N] -= penalty * counts_N
