"""Sampling of tokens: greedy, or a random draw.

The random generator is counter-based: the noise on token v at position p of a request with seed s is a hash of (s, p, v). A request thus
draws the same tokens in any batch, on any layout, and after being moved or resumed. Tokens are drawn by the Gumbel-max trick (Maddison
et al. 2014, arXiv:1411.0030). Rounding changes its result only if two candidates are almost tied; inverting a cumulative sum would be
sensitive to every rounding error.

Probabilities are summed as integers, whose sum does not depend on the order: the cut of top-p is independent of how the sum is split
over vectors and threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from labinfer.base.draw_params import DrawParams
from labinfer.functions.draw import Draw

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
"""Constants of the generator SplitMix64 (Steele, Lea & Flood 2014, OOPSLA), as int64, which wraps on overflow as uint64 does."""
LIKELIEST = 2.0**40
"""Integer weight of the largest logit in sums of probabilities: 2**23 such weights fit into 64 bits."""
FIRST_LOOK = 1024
"""Largest logits that top-p sorts first; it sorts more only if these do not reach ``top_p``."""


def argmax(logits_BV: torch.Tensor) -> torch.Tensor:
    """Id of each row's largest logit (B); ties go to the lowest id; in a row with NaN, the first NaN counts as largest."""
    return logits_BV.argmax(dim=-1)


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Token id of each draw: temperature, then the candidate filters, then Gumbel noise on the remaining logits, in float64.

    If a row's largest logit is NaN or infinite, its token is returned without a random draw. Rows of an accelerator are copied to
    host memory first: a draw there would synchronize several times, and not every accelerator has float64.
    """
    logits_BV, draws = drawn_rows_on_host(logits_BV, draws)
    return [_draw(logits_BV[draw.row], draw) for draw in draws]


def drawn_rows_on_host(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, Sequence[Draw]]:
    """Copy the drawn rows to host memory at once. Returns these rows, and the draws with indices into these rows; both arguments
    unchanged if logits are on the CPU."""
    if logits_BV.device.type == "cpu" or not draws:
        return logits_BV, draws
    rows_RV = torch.stack([logits_BV[draw.row] for draw in draws])  # indexing by a tensor would copy that tensor, too
    return rows_RV.cpu(), [msgspec.structs.replace(draw, row=index) for index, draw in enumerate(draws)]


def _draw(logits_V: torch.Tensor, draw: Draw) -> int:
    largest = int(argmax(logits_V))
    if not logits_V[largest].isfinite():
        return largest
    scaled_V = logits_V.double() / draw.params.temperature
    candidates_N = candidates(scaled_V, draw.params)
    noisy_N = scaled_V[candidates_N] + gumbel_noise(draw.params.seed, draw.position, candidates_N)
    return int(candidates_N[noisy_N.argmax()])


def candidates(scaled_V: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Ids of the tokens that may be drawn, ascending (N).

    Args:
        scaled_V: logits divided by the temperature, finite or -inf, float64.
    """
    vocab_size = scaled_V.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    # top-p, top-k and min-p take the largest logits first, ties by id, so that equal logits give equal sets.
    if params.top_p < 1.0:
        ids_N = _top_p(scaled_V, top_k, params.top_p)
    elif top_k < vocab_size or params.typical_p < 1.0:
        ids_N = _largest(scaled_V, top_k)
    else:
        ids_N = torch.arange(vocab_size, device=scaled_V.device)
    if params.min_p > 0.0:
        ids_N = ids_N[scaled_V[ids_N] >= float(scaled_V.max()) + math.log(params.min_p)]
    if params.typical_p < 1.0:
        ids_N = ids_N[_typical(scaled_V[ids_N], params.typical_p)]
    return ids_N.sort().values


def _largest(scaled_V: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest logits, in descending order; ties by ascending id."""
    if count >= scaled_V.shape[0]:
        return scaled_V.argsort(descending=True, stable=True)
    last = scaled_V.topk(count).values[-1]
    above_N, equal_N = (chosen_V.nonzero().flatten() for chosen_V in (scaled_V > last, scaled_V == last))
    ids_N = torch.cat((above_N, equal_N[: count - above_N.shape[0]]))
    return ids_N[scaled_V[ids_N].argsort(descending=True, stable=True)]


def _top_p(scaled_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Ids of the tokens among the ``top_k`` largest whose preceding cumulative probability is less than ``top_p``."""
    largest, whole = float(scaled_V.max()), top_k == scaled_V.shape[0]
    weights_V = (
        integer_weights(scaled_V, largest) if whole else integer_weights(scaled_V[_largest(scaled_V, top_k)], largest)
    )
    limit, count = top_p * float(weights_V.sum()), min(top_k, FIRST_LOOK)
    while True:
        ids_N = _largest(scaled_V, count)
        weights_N = integer_weights(scaled_V[ids_N], largest)
        sums_N = weights_N.cumsum(dim=-1)
        if count == top_k or float(sums_N[-1]) >= limit:
            return ids_N[(sums_N - weights_N).double() < limit]
        count = top_k


def integer_weights(scaled_N: torch.Tensor, largest: float | torch.Tensor) -> torch.Tensor:
    """Probabilities as int64, scaled so that the largest logit has ``LIKELIEST``."""
    return ((scaled_N - largest).exp() * LIKELIEST).long()


def _typical(scaled_N: torch.Tensor, typical_p: float) -> torch.Tensor:
    """Indices that locally typical sampling keeps (Meister et al. 2022, arXiv:2202.00666)."""
    logprobs_N = scaled_N.log_softmax(dim=-1)
    probabilities_N = logprobs_N.exp()
    entropy = -(probabilities_N * logprobs_N.clamp(min=-1e300)).sum()  # a token without probability adds nothing
    order_N = (-logprobs_N - entropy).abs().argsort(stable=True)
    before_N = probabilities_N[order_N].cumsum(dim=-1) - probabilities_N[order_N]
    return order_N[before_N < typical_p]


def gumbel_noise(seed: int | torch.Tensor, position: int | torch.Tensor, token_ids_N: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each token id, float64; a pure function of its arguments. ``seed`` and ``position`` may be tensors for several
    draws."""
    key = split_mix(split_mix(torch.as_tensor(seed)) + torch.as_tensor(position))
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
