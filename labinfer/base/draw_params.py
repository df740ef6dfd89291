"""DrawParams: the numbers of a request that choose its tokens, from the plan to the functions that draw."""

from __future__ import annotations

import msgspec


class DrawParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """With the logits and the token's position they determine the token.

    Each set of candidates is taken from what the set before left: top-k, top-p, min-p, typical-p.
    """

    seed: int = 0
    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy."""
    top_k: int = 0
    """Only the k largest logits; 0 or less for all, as is the vocabulary's size or more."""
    top_p: float = 1.0
    """Only the largest, for as long as those before have less than this probability; 1 for all."""
    min_p: float = 0.0
    """Only tokens with at least this fraction of the largest probability; 0 for all."""
    typical_p: float = 1.0
    """Only the most typical, for as long as those before have less than this probability; 1 for all."""
