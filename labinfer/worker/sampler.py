"""From logits to tokens.

Randomness comes from a counter, not from a stream: the noise on token v of the token at position p of a request with
seed s is a hash of (s, p, v). So the same request draws the same tokens in any batch, on any layout, and after being
moved or resumed. Tokens are drawn by the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030), whose answer
changes only when two candidates are tied to rounding, where inverting a cumulative sum would shift with every bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from labinfer.plan import GREEDY_BELOW, TokenSampling
from labinfer.worker.logits_processors.registry import Processor, SampledRow

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
"""SplitMix64 (Steele, Lea & Flood 2014, OOPSLA), as signed 64-bit numbers, which wrap as unsigned ones do."""


class Sampler:
    """Chooses the next token of every row.

    Args:
        processors: the logits processors that rows may name.
    """

    def __init__(self, processors: Mapping[str, Processor]):
        self._processors = processors

    def __call__(self, logits_BV: torch.Tensor, rows: list[SampledRow]) -> list[int]:
        """One token id for each row.

        Args:
            logits_BV: unscaled, any float type.
            rows: how to choose, and what is there so far.
        """
        tokens_B = logits_BV.argmax(dim=-1).tolist()
        for index, row in enumerate(rows):
            if row.sampling.after_processors:
                continue  # of beams only what is measured counts
            if row.sampling.processors or row.sampling.temperature > 0:
                tokens_B[index] = sample_row(self.process(logits_BV[index].float(), row), row)
        return tokens_B

    def process(self, logits_V: torch.Tensor, row: SampledRow) -> torch.Tensor:
        """What the row's logits processors make of its logits, float32."""
        if not row.sampling.processors:
            return logits_V
        processed_V = logits_V.clone()
        for name, value in row.sampling.processors:
            self._processors[name](processed_V, value, row)
        # Where the processors of a request leave nothing, the model has the last word.
        return processed_V if processed_V.max() > float("-inf") else logits_V


def sample_row(logits_V: torch.Tensor, row: SampledRow) -> int:
    """Draw one token: temperature, then the candidate sets, then Gumbel noise on what is left."""
    sampling = row.sampling
    if sampling.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    scaled_V = logits_V.double() / sampling.temperature
    candidates_N = _candidates(scaled_V, sampling)
    noisy_N = scaled_V[candidates_N] + gumbel_noise(sampling.seed, len(row.token_ids), candidates_N)
    return int(candidates_N[noisy_N.argmax()])


def measure(logprobs_BV: torch.Tensor, token_ids: list[int], tops: list[int]) -> list[list[float]]:
    """For each row its token's log-probability, then id and log-probability of so many of the likeliest."""
    own_B = logprobs_BV[range(len(token_ids)), token_ids].tolist()
    values_BN, ids_BN = (found.tolist() for found in logprobs_BV.topk(max(tops)))
    measured = []
    for own, values, ids, top in zip(own_B, values_BN, ids_BN, tops, strict=True):
        pairs = zip(ids[:top], values[:top], strict=True)
        measured.append([own, *(number for pair in pairs for number in pair)])
    return measured


def _candidates(scaled_V: torch.Tensor, sampling: TokenSampling) -> torch.Tensor:
    """Ids of the tokens that may be drawn (N): top-k, top-p, min-p, typical-p, each of what the one before left."""
    vocab_size = scaled_V.shape[0]
    top_k = 0 < sampling.top_k < vocab_size
    if not (top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0):
        return torch.arange(vocab_size, device=scaled_V.device)
    # Ties are broken by token id (a stable sort), so that equal logits give equal sets everywhere.
    candidates_N = scaled_V.argsort(descending=True, stable=True)
    if top_k:
        candidates_N = candidates_N[: sampling.top_k]
    if sampling.top_p < 1.0:
        probabilities_N = scaled_V[candidates_N].softmax(dim=-1)
        candidates_N = candidates_N[_before(probabilities_N) < sampling.top_p]
    if sampling.min_p > 0.0:
        probabilities_N = scaled_V[candidates_N].softmax(dim=-1)
        candidates_N = candidates_N[probabilities_N >= sampling.min_p * probabilities_N[0]]
    if sampling.typical_p < 1.0:
        logprobs_N = scaled_V[candidates_N].log_softmax(dim=-1)
        probabilities_N = logprobs_N.exp()
        entropy = -(probabilities_N * logprobs_N.clamp(min=-1e300)).sum()  # a token without probability adds nothing
        order_N = (-logprobs_N - entropy).abs().argsort(stable=True)
        candidates_N = candidates_N[order_N][_before(probabilities_N[order_N]) < sampling.typical_p]
    return candidates_N


def _before(probabilities_N: torch.Tensor) -> torch.Tensor:
    """The mass of all that come before each."""
    return probabilities_N.cumsum(dim=-1) - probabilities_N


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
