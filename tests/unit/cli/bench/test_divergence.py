"""The figures of ``bench accuracy`` on distributions whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch

from labinfer.cli.bench.divergence import compare, summarize

P, Q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]


def logits(*rows: list[float]) -> torch.Tensor:
    """Logits of these distributions, each shifted by some constant, which must not matter."""
    return torch.tensor(rows).log() + torch.arange(1.0, len(rows) + 1).unsqueeze(1)


def test_known_distributions():
    """KL(P ‖ Q) = ½ ln 2 + ¼ ln 1 + ¼ ln ½; the text is the second token, then the first."""
    figures = summarize(compare(logits(P, P), logits(Q, P), torch.tensor([2, 0])))
    assert figures.tokens == 2
    assert figures.reference_perplexity == pytest.approx(math.sqrt(4 * 2))
    assert figures.perplexity == pytest.approx(math.sqrt(2 * 2))
    assert figures.largest_kl_divergence == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert figures.kl_divergence == pytest.approx(0.125 * math.log(2), rel=1e-6)
    assert figures.same_likeliest == 0.5


def test_divergence_is_of_the_reference():
    """KL is not symmetric: where the reference is certain, the other's probability of that token is all that counts."""
    certain, even = logits([1.0, 1e-30]), logits([0.5, 0.5])
    token = torch.tensor([0])
    assert summarize(compare(certain, even, token)).kl_divergence == pytest.approx(math.log(2))
    assert summarize(compare(even, certain, token)).kl_divergence > 30


def test_model_is_no_way_from_itself():
    rows = torch.randn(5, 1000)
    figures = summarize(compare(rows, rows, torch.arange(5)))
    assert figures.kl_divergence == figures.largest_kl_divergence == 0
    assert figures.same_likeliest == 1
    assert figures.perplexity == figures.reference_perplexity


def test_small_divergences_are_not_lost_in_rounding():
    """For a small change d of one logit of V equal ones, KL is d²/2 · (1/V)(1 - 1/V); here 5e-12."""
    reference, ours = torch.zeros(1, 1000), torch.zeros(1, 1000)
    ours[0, 3] = 1e-4
    found = summarize(compare(reference, ours, torch.tensor([0]))).kl_divergence
    assert found == pytest.approx(0.5e-8 * 1e-3 * (1 - 1e-3), rel=1e-3)


def test_of_no_tokens_there_are_no_figures():
    figures = summarize(torch.zeros(0, 4, dtype=torch.float64))
    assert figures.tokens == 0 and math.isnan(figures.perplexity) and math.isnan(figures.largest_kl_divergence)
