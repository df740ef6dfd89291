"""DrawParams: numeric sampling parameters of a request, as the sampling functions receive them."""

from __future__ import annotations

import msgspec


class DrawParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Numeric sampling parameters. With the logits and the token's position they determine the token.

    Candidate filters apply one after another: top-k, top-p, min-p, typical-p. Each filters the candidates that its predecessor kept.
    """

    seed: int = 0
    temperature: float = 0.0
    """Divisor of the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k largest logits; 0 or less keeps all, as does the vocabulary size or more."""
    top_p: float = 1.0
    """Nucleus sampling: keep the smallest set of the likeliest tokens whose total probability is at least ``top_p``; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with a probability of at least ``min_p`` times the largest one; 0 keeps all."""
    typical_p: float = 1.0
    """Locally typical sampling: keep the smallest set of the most typical tokens whose total probability is at least ``typical_p``; 1 keeps all."""
