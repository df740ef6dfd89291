"""Divergence of one model's predictions from another's, token by token and on average."""

from __future__ import annotations

import msgspec
import torch


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Means over tokens of a text. NaN where there are none."""

    tokens: int
    """Tokens that were predicted."""
    reference_perplexity: float
    perplexity: float
    """``exp`` of the mean negative log-probability of the text's tokens."""
    kl_divergence: float
    """Mean of KL(reference ‖ model) over the vocabulary, in nats (Kullback and Leibler 1951)."""
    largest_kl_divergence: float
    same_likeliest: float
    """Share of the tokens before which both find the same token the likeliest."""


def compare(reference_BV: torch.Tensor, logits_BV: torch.Tensor, next_B: torch.Tensor) -> torch.Tensor:
    """Numbers of each token for ``summarize``: (B, 4) float64.

    Args:
        reference_BV: the reference's logits.
        logits_BV: those of the model that is measured.
        next_B: the text's tokens at these places.
    """
    # Two models may differ by less than what float32 loses in a sum over the vocabulary.
    exact_BV = reference_BV.double().log_softmax(dim=-1)
    ours_BV = logits_BV.double().log_softmax(dim=-1)
    kl_B = (exact_BV.exp() * (exact_BV - ours_BV)).sum(dim=-1)
    same_B = reference_BV.argmax(dim=-1) == logits_BV.argmax(dim=-1)
    of_text = [-logprobs_BV.gather(1, next_B.unsqueeze(1)).squeeze(1) for logprobs_BV in (exact_BV, ours_BV)]
    return torch.stack([*of_text, kl_B, same_B.double()], dim=1).cpu()


def summarize(compared: torch.Tensor) -> Divergence:
    """From what ``compare`` gave of some tokens, (tokens, 4)."""
    reference, ours, kl, same = compared.mean(dim=0).tolist()
    largest = compared[:, 2].max().item() if len(compared) else float("nan")
    perplexities = torch.tensor([reference, ours], dtype=torch.float64).exp().tolist()  # infinite, where it is
    return Divergence(
        tokens=len(compared),
        reference_perplexity=perplexities[0],
        perplexity=perplexities[1],
        kl_divergence=kl,
        largest_kl_divergence=largest,
        same_likeliest=same,
    )
