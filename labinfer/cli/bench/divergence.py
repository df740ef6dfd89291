"""Divergence: how far a model's predictions differ from a reference model's, per token and on average."""

from __future__ import annotations

import msgspec
import torch


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the tokens of texts; NaN without tokens."""

    tokens: int
    """Number of predicted tokens."""
    reference_perplexity: float
    perplexity: float
    """``exp`` of the mean negative log-probability of the text's tokens."""
    kl_divergence: float
    """Mean of KL(reference ‖ model) over the vocabulary, in nats (Kullback and Leibler 1951)."""
    largest_kl_divergence: float
    same_likeliest: float
    """Fraction of positions at which both models have the same most likely token."""


def compare(reference_BV: torch.Tensor, logits_BV: torch.Tensor, next_B: torch.Tensor) -> torch.Tensor:
    """Values of each token for ``summarize``: (B, 4) float64.

    Args:
        reference_BV: logits of the reference model.
        logits_BV: logits of the measured model.
        next_B: the text's next token in each row.
    """
    # Two models may differ by less than the rounding error of a float32 sum over the vocabulary.
    exact_BV = reference_BV.double().log_softmax(dim=-1)
    ours_BV = logits_BV.double().log_softmax(dim=-1)
    kl_B = (exact_BV.exp() * (exact_BV - ours_BV)).sum(dim=-1)
    same_B = reference_BV.argmax(dim=-1) == logits_BV.argmax(dim=-1)
    of_text = [-logprobs_BV.gather(1, next_B.unsqueeze(1)).squeeze(1) for logprobs_BV in (exact_BV, ours_BV)]
    return torch.stack([*of_text, kl_B, same_B.double()], dim=1).cpu()


def summarize(compared: torch.Tensor) -> Divergence:
    """Means over ``compared``, rows of ``compare``: (tokens, 4)."""
    reference, ours, kl, same = compared.mean(dim=0).tolist()
    largest = compared[:, 2].max().item() if len(compared) else float("nan")
    perplexities = torch.tensor([reference, ours], dtype=torch.float64).exp().tolist()  # may be infinite
    return Divergence(
        tokens=len(compared),
        reference_perplexity=perplexities[0],
        perplexity=perplexities[1],
        kl_divergence=kl,
        largest_kl_divergence=largest,
        same_likeliest=same,
    )
