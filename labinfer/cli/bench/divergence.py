"""Divergence: how far the predictions of a model differ from those of a reference model, per token and on average."""

from __future__ import annotations

import msgspec
import torch


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """How far the predictions of a model differ from those of a reference model, on average over tokens of texts. NaN without
    tokens."""

    tokens: int
    """Number of predicted tokens."""
    reference_perplexity: float
    perplexity: float
    """Perplexity of the model: ``exp`` of the mean negative log-probability of the texts' tokens."""
    kl_divergence: float
    """Mean of KL(reference ‖ model) over the vocabulary, in nats (Kullback and Leibler 1951)."""
    largest_kl_divergence: float
    same_likeliest: float
    """Fraction of positions at which one token is the likeliest in both models."""


def compare(reference_BV: torch.Tensor, logits_BV: torch.Tensor, next_B: torch.Tensor) -> torch.Tensor:
    """Compare the predictions of two models, row by row. Returns values for ``summarize``: (B, 4) float64.

    Args:
        reference_BV: logits of the reference model.
        logits_BV: logits of the measured model.
        next_B: id of the next token of the text, for each row.
    """
    # The difference of two models may be below the rounding error of a float32 sum over the vocabulary.
    exact_BV = reference_BV.double().log_softmax(dim=-1)
    ours_BV = logits_BV.double().log_softmax(dim=-1)
    kl_B = (exact_BV.exp() * (exact_BV - ours_BV)).sum(dim=-1)
    same_B = reference_BV.argmax(dim=-1) == logits_BV.argmax(dim=-1)
    of_text = [-logprobs_BV.gather(1, next_B.unsqueeze(1)).squeeze(1) for logprobs_BV in (exact_BV, ours_BV)]
    return torch.stack([*of_text, kl_B, same_B.double()], dim=1).cpu()


def summarize(compared: torch.Tensor) -> Divergence:
    """Means over rows that ``compare`` has returned: (tokens, 4)."""
    reference, ours, kl, same = compared.mean(dim=0).tolist()
    largest = compared[:, 2].max().item() if len(compared) else float("nan")
    perplexities = torch.tensor([reference, ours], dtype=torch.float64).exp().tolist()  # the result may be infinite
    return Divergence(
        tokens=len(compared),
        reference_perplexity=perplexities[0],
        perplexity=perplexities[1],
        kl_divergence=kl,
        largest_kl_divergence=largest,
        same_likeliest=same,
    )
