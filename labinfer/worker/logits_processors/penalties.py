"""Penalties: logits processors that make tokens of the prompt or answer less likely."""

from __future__ import annotations

import torch

from labinfer.worker.logits_processors.processor import SampledRow


def repetition_penalty(logits_V: torch.Tensor, penalty: float, row: SampledRow) -> None:
    """Penalize tokens of prompt and answer (Keskar et al. 2019, arXiv:1909.05858), as in Transformers."""
    seen_N = torch.tensor(row.token_ids, device=logits_V.device).unique()
    logits_N = logits_V[seen_N]
    logits_V[seen_N] = torch.where(logits_N < 0, logits_N * penalty, logits_N / penalty)


def presence_penalty(logits_V: torch.Tensor, penalty: float, row: SampledRow) -> None:
    """Penalize each token of the answer once, as in OpenAI's API."""
    logits_V[torch.tensor(row.output_ids, dtype=torch.int64, device=logits_V.device).unique()] -= penalty


def frequency_penalty(logits_V: torch.Tensor, penalty: float, row: SampledRow) -> None:
    """Penalize each token of the answer once per occurrence, as in OpenAI's API."""
    output_N = torch.tensor(row.output_ids, dtype=torch.int64, device=logits_V.device)
    token_ids_N, counts_N = output_N.unique(return_counts=True)
    logits_V[token_ids_N] -= penalty * counts_N
