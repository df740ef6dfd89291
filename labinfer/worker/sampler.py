"""From logits to tokens.

Randomness comes from a counter, not from a stream: the noise on token v of the token at position p of a request with
seed s is a hash of (s, p, v). So the same request draws the same tokens in any batch, on any layout, and after being
moved or resumed. Tokens are drawn by the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030), whose answer
changes only when two candidates are tied to rounding, where inverting a cumulative sum would shift with every bit.
"""

from __future__ import annotations

import torch

from labinfer.plan import GREEDY_BELOW, TokenSampling

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
"""SplitMix64 (Steele, Lea & Flood 2014, OOPSLA), as signed 64-bit numbers, which wrap as unsigned ones do."""


class Sampler:
    """Chooses the next token of every row."""

    def __call__(self, logits_BV: torch.Tensor, params: list[TokenSampling], positions: list[int]) -> list[int]:
        """One token id for each row.

        Args:
            logits_BV: unscaled, any float type.
            params: how to choose, per row.
            positions: index in its sequence of the token to be chosen, per row.
        """
        tokens_B = logits_BV.argmax(dim=-1).tolist()
        for row, (sampling, position) in enumerate(zip(params, positions, strict=True)):
            if sampling.temperature > 0:
                tokens_B[row] = sample_row(logits_BV[row].float(), sampling, position)
        return tokens_B


def sample_row(logits_V: torch.Tensor, sampling: TokenSampling, position: int) -> int:
    """Draw one token: temperature, then top-k, then top-p, then Gumbel noise on what is left."""
    if sampling.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    scaled_V = logits_V.double() / sampling.temperature
    candidates_N = torch.arange(scaled_V.shape[0], device=scaled_V.device)
    if 0 < sampling.top_k < scaled_V.shape[0] or sampling.top_p < 1.0:
        # Ties are broken by token id (a stable sort), so that equal logits give equal sets everywhere.
        candidates_N = scaled_V.argsort(descending=True, stable=True)
        if 0 < sampling.top_k < scaled_V.shape[0]:
            candidates_N = candidates_N[: sampling.top_k]
        if sampling.top_p < 1.0:
            probabilities_N = scaled_V[candidates_N].softmax(dim=-1)
            before_N = probabilities_N.cumsum(dim=-1) - probabilities_N
            candidates_N = candidates_N[before_N < sampling.top_p]
    noisy_N = scaled_V[candidates_N] + gumbel_noise(sampling.seed, position, candidates_N)
    return int(candidates_N[noisy_N.argmax()])


def gumbel_noise(seed: int, position: int, token_ids_N: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each token id, float64, a pure function of its arguments."""
    key = split_mix(split_mix(torch.tensor(seed)) + torch.tensor(position))
    bits_N = split_mix(key.to(token_ids_N.device) + token_ids_N * GAMMA)
    uniform_N = (_shift_right(bits_N, 11).double() + 0.5) * 2.0**-53  # in (0, 1), never 0 or 1
    return -torch.log(-torch.log(uniform_N))


def split_mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function of an int64 tensor."""
    x = x + GAMMA
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
