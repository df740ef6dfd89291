"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaling types.

- ``linear`` divides positions (Chen et al. 2023, arXiv:2306.15595).
- ``llama3`` divides only the low frequencies, as the reference code of Llama 3.1's model card does.
- ``yarn`` blends divided and original frequencies, and sharpens attention (Peng et al. 2023, arXiv:2309.00071).
- ``longrope`` has a factor for each frequency (Ding et al. 2024, arXiv:2402.13753). If there are two sets of factors, the run's context
  limit selects one, so that all keys of a sequence are rotated by one set.
- ``dynamic`` scales the base by the context length once it exceeds the checkpoint's (dynamic NTK; Transformers 5.24,
  ``_compute_dynamic_ntk_parameters``). With an ``alpha`` it is the fixed scaling of HunYuan's checkpoints.
- ``proportional`` rotates only a part of the pairs, with the frequencies that they have among all pairs (Gemma 4).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labinfer.base.errors import UserError
from labinfer.functions.reference.elementwise import rotary

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
COVERED_AT_ONCE = 512
"""Positions by which a rotary table grows; few enough that torch starts no threads for them."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Config of a rotary table, which layers with equal configs share."""

    dim: int
    """Number of rotary dimensions, R: the first dimensions of a head."""
    parameters: Mapping[str, Any]
    """``rope_type``, ``rope_theta`` and the keys of that type, named as in Hugging Face's config."""
    max_position: int
    """Context length of the checkpoint."""
    interleaved: bool = False
    """Whether rope rotates the interleaved pairs of dimensions (2i, 2i + 1) instead of (i, i + R/2)."""

    @property
    def dynamic_from(self) -> int:
        """Context length up to which ``dynamic`` rope is not scaled; 0 for other types.

        Longer sequences follow Transformers' ``generate``: the tokens of a prompt use the frequencies of the prompt's length, each later
        token those of the context length up to itself. Cached keys keep their rotation.
        """
        is_dynamic = self.parameters.get("rope_type") == "dynamic" and not self.parameters.get("alpha")
        return self.max_position if is_dynamic else 0


def inverse_frequencies(
    head_size: int, parameters: Mapping[str, Any], max_position: int, length: int = 0
) -> tuple[torch.Tensor, float]:
    """Frequency (angle per position) of each pair, (R/2,) float32, and the factor on cos and sin.

    Args:
        head_size: rotary dimensions, R.
        parameters, max_position: see ``RopeConfig``.
        length: maximum context length of the run; selects the short or the long factors of ``longrope``.

    Raises:
        UserError: the type is not in ``ROPE_TYPES``, or a parameter is missing or not a number.
    """
    kind = parameters.get("rope_type", "default")
    base = _number(parameters, "rope_theta")
    plain = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
    if kind == "default":
        return plain, 1.0
    if kind == "proportional":
        share = _number(parameters, "partial_rotary_factor", 1.0)
        is_turned = torch.arange(len(plain)) < int(share * head_size // 2)
        return torch.where(is_turned, plain / _number(parameters, "factor", 1.0), 0.0), 1.0
    if kind == "linear":
        return plain / _number(parameters, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, parameters), 1.0
    if kind == "yarn":
        return _yarn(plain, base, head_size, parameters, max_position)
    if kind == "longrope":
        return _longrope(plain, parameters, max_position, length)
    if kind == "dynamic" and parameters.get("alpha"):
        stretched = base * _number(parameters, "alpha") ** (head_size / (head_size - 2))
        return 1.0 / stretched ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size), 1.0
    if kind == "dynamic":
        return dynamic_frequencies(head_size, parameters, max_position, torch.tensor([max_position]))[0], 1.0
    raise UserError(f"rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")


def dynamic_frequencies(
    head_size: int, parameters: Mapping[str, Any], max_position: int, lengths_S: torch.Tensor
) -> torch.Tensor:
    """Frequencies of each pair by dynamic NTK, for contexts of ``lengths_S`` tokens, (S, R/2) float32.

    Raises:
        UserError: a parameter is missing or not a number.
    """
    base, factor = _number(parameters, "rope_theta"), _number(parameters, "factor")
    stretch_S = factor * lengths_S.clamp(min=max_position) / max_position - (factor - 1)
    base_S1 = (base * stretch_S ** (head_size / (head_size - 2))).unsqueeze(1)
    return 1.0 / base_S1 ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)


def check_rope(rope: RopeConfig) -> None:
    """Check that the frequencies of ``rope`` are finite.

    Raises:
        UserError: a frequency is not finite, or a parameter is invalid.
    """
    try:
        with torch.device("cpu"):
            frequencies_F, factor = inverse_frequencies(rope.dim, rope.parameters, rope.max_position)
            is_sound = math.isfinite(factor) and bool(frequencies_F.isfinite().all())
    except ArithmeticError:
        is_sound = False
    if not is_sound:
        raise UserError(f"the config's rope parameters {rope.parameters!r:.200} give angles that are no numbers")


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise UserError(f"the config's rope parameter {key!r} should be a number above 0, not {value!r:.60}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _llama3(plain: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelength > original / low, plain / factor, smooth)
    return torch.where(wavelength < original / high, plain, stretched)


def _yarn(
    plain: torch.Tensor, base: float, head_size: int, parameters: Mapping[str, Any], max_position: int
) -> tuple[torch.Tensor, float]:
    factor = _number(parameters, "factor")
    original = _number(parameters, "original_max_position_embeddings", max_position)

    def dimension_turning(times: float) -> float:
        """Index of the pair whose angle makes ``times`` turns over the original context."""
        return head_size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    def sharpening(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low = dimension_turning(_number(parameters, "beta_fast", 32))
    high = dimension_turning(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low or 0.001  # negative for a short original context: a reversed ramp, as in Transformers
    ramp = ((torch.arange(head_size // 2).float() - low) / width).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    if parameters.get("attention_factor") is not None:
        return frequencies, _number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):  # DeepSeek's spelling
        return frequencies, sharpening(_number(parameters, "mscale")) / sharpening(
            _number(parameters, "mscale_all_dim")
        )
    return frequencies, sharpening()


def _longrope(
    plain: torch.Tensor, parameters: Mapping[str, Any], max_position: int, length: int
) -> tuple[torch.Tensor, float]:
    original = _number(parameters, "original_max_position_embeddings", max_position)
    factors = {}
    for key in ("short_factor", "long_factor"):
        given = parameters.get(key)
        if not isinstance(given, list) or len(given) != len(plain) or not all(_is_number(f) and f > 0 for f in given):
            raise UserError(
                f"the config's rope parameter {key!r} should be {len(plain)} numbers above 0, not {given!r:.60}"
            )
        factors[key] = torch.tensor(given, dtype=torch.float32)
    frequencies = plain / factors["long_factor" if length > original else "short_factor"]
    if parameters.get("attention_factor") is not None:
        return frequencies, _number(parameters, "attention_factor")
    stretch = _number(parameters, "factor", max_position / original)
    if stretch <= 1:
        return frequencies, 1.0
    if original <= 1:
        raise UserError(f"original_max_position_embeddings {original:g} needs an attention_factor beside it")
    return frequencies, math.sqrt(1 + math.log(stretch) / math.log(original))


class RotaryTable:
    """cos and sin of every position up to the maximum context length. Rows are computed when a context first reaches them.

    Args:
        length: maximum number of positions.
        dtype: dtype of the activations that are rotated.
        num_placed: additional rows after those of positions, for ``place``.
    """

    def __init__(self, rope: RopeConfig, length: int, dtype: torch.dtype, device: torch.device, num_placed: int = 0):
        frequencies_F, factor = inverse_frequencies(rope.dim, rope.parameters, rope.max_position, length)
        self._rope, self._length = rope, length
        self._interleaved = rope.interleaved
        self._frequencies_F, self._factor = frequencies_F, factor
        self._frequencies_R = self._spread(frequencies_F).to(device)
        self._cos_SR, self._sin_SR = (
            torch.empty((length + num_placed, 2 * len(frequencies_F)), dtype=dtype, device=device) for _ in range(2)
        )
        self._num_covered = 0
        self.cover(1)

    def cover(self, length: int) -> None:
        """Extend the table to at least ``length`` positions, in place."""
        while self._num_covered < length:
            begin, end = self._num_covered, min(self._num_covered + COVERED_AT_ONCE, self._length)
            assert begin < end, f"a rotary table of {end} positions is asked for {length}"
            positions_S = torch.arange(begin, end)
            self._fill(begin, positions_S, positions_S + 1)
            self._num_covered = end

    def place(self, positions_S: torch.Tensor, lengths_S: torch.Tensor) -> None:
        """Fill the additional rows for tokens of long prompts; valid until the next call.

        Args:
            positions_S: position of each token, in the order of the rows.
            lengths_S: length of each token's prompt.
        """
        assert self._length + len(positions_S) <= len(self._cos_SR), f"{len(positions_S)} rows are to be placed"
        self._fill(self._length, positions_S, lengths_S)

    def _fill(self, begin: int, positions_S: torch.Tensor, lengths_S: torch.Tensor) -> None:
        """Compute the rows from ``begin`` on.

        Args:
            lengths_S: context length of each row, which determines the frequencies of ``dynamic`` rope.
        """
        rope, rows, frequencies = self._rope, slice(begin, begin + len(positions_S)), self._frequencies_F
        if rope.dynamic_from and len(lengths_S) and int(lengths_S.max()) > rope.dynamic_from:
            frequencies = dynamic_frequencies(rope.dim, rope.parameters, rope.max_position, lengths_S)
        angles_SF = positions_S.float().unsqueeze(1) * frequencies
        self._cos_SR[rows] = self._spread(angles_SF.cos() * self._factor)
        self._sin_SR[rows] = self._spread(angles_SF.sin() * self._factor)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``positions_T`` of cos and sin, (T, R) each; ``cover`` or ``place`` must have filled these rows of the table."""
        return self._cos_SR[positions_T], self._sin_SR[positions_T]

    def turn(self, x_SKR: torch.Tensor, positions: int) -> torch.Tensor:
        """Re-rotate float32 vectors by ``positions`` positions; a negative number moves them back."""
        angles_1R = (self._frequencies_R * positions).unsqueeze(0)
        return rotary(x_SKR, angles_1R.cos(), angles_1R.sin(), self._interleaved)

    def _spread(self, x_F: torch.Tensor) -> torch.Tensor:
        """Repeat each value of ``x_F`` for both dimensions of its rotated pair: (…, R/2) → (…, R)."""
        return x_F.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((x_F, x_F), dim=-1)
