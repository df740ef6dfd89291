"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its stretched forms.

``linear`` divides positions (Chen et al. 2023, arXiv:2306.15595); ``llama3`` divides only the slow frequencies, as the
Llama 3.1 model card's reference code does; ``yarn`` blends both and sharpens attention (Peng et al. 2023, arXiv:2309.00071).
"""

from __future__ import annotations

import math

import torch

from labinfer.errors import UserError
from labinfer.functions.reference.elementwise import rotary

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(head_size: int, parameters: dict, max_position: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair, (P/2,) float32, and the factor on cos and sin.

    Args:
        parameters: ``rope_type``, ``rope_theta`` and what that type needs, with the names of Hugging Face's config.

    Raises:
        UserError: a type that is not in ``ROPE_TYPES``, or a parameter that is missing or no number.
    """
    kind = parameters.get("rope_type", "default")
    base = _number(parameters, "rope_theta")
    plain = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / _number(parameters, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, parameters), 1.0
    if kind == "yarn":
        return _yarn(plain, base, head_size, parameters, max_position)
    raise UserError(f"rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")


def _number(parameters: dict, key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"the config's rope parameter {key!r} should be a number, not {value!r}")
    return float(value)


def _llama3(plain: torch.Tensor, parameters: dict) -> torch.Tensor:
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelength > original / low, plain / factor, smooth)
    return torch.where(wavelength < original / high, plain, stretched)


def _yarn(
    plain: torch.Tensor, base: float, head_size: int, parameters: dict, max_position: int
) -> tuple[torch.Tensor, float]:
    factor = _number(parameters, "factor")
    original = _number(parameters, "original_max_position_embeddings", max_position)

    def dimension_turning(times: float) -> float:
        """The dimension whose angle turns this many times over the original context."""
        return head_size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    def sharpening(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low = dimension_turning(_number(parameters, "beta_fast", 32))
    high = dimension_turning(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    ramp = ((torch.arange(head_size // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    if parameters.get("attention_factor") is not None:
        return frequencies, _number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):  # DeepSeek's spelling
        return frequencies, sharpening(_number(parameters, "mscale")) / sharpening(
            _number(parameters, "mscale_all_dim")
        )
    return frequencies, sharpening()


class RotaryTable:
    """cos and sin of every position up to the longest context, shared by the layers of a stage."""

    def __init__(
        self, head_size: int, parameters: dict, max_position: int, length: int, dtype: torch.dtype, device: torch.device
    ):
        frequencies, factor = inverse_frequencies(head_size, parameters, max_position)
        self._frequencies_P = frequencies.repeat(2).to(device)
        angles_SP = torch.outer(torch.arange(length).float(), frequencies)  # of the first half; the second is the same
        self._cos_SP = (angles_SP.cos() * factor).to(device, dtype).repeat(1, 2)
        self._sin_SP = (angles_SP.sin() * factor).to(device, dtype).repeat(1, 2)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for these positions, (T, P) each."""
        return self._cos_SP[positions_T], self._sin_SP[positions_T]

    def turn(self, k_SKP: torch.Tensor, positions: int) -> torch.Tensor:
        """Keys, float32, as they would be so many positions further on; a negative number moves them back."""
        angles_1P = (self._frequencies_P * positions).unsqueeze(0)
        return rotary(k_SKP, angles_1P.cos(), angles_1P.sin())
