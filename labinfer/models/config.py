"""A checkpoint's ``config.json``, read into one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labinfer.errors import UserError
from labinfer.layers.rope import inverse_frequencies
from labinfer.weights.json_file import read_json


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: dict
    """``rope_type``, ``rope_theta`` and what that type needs."""
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    """Of each layer: the tokens that a token sees, itself included; 0 for all."""
    dtype: str
    eos_token_ids: tuple[int, ...]


class ConfigFile:
    """``config.json`` with typed access; every error names the file and the key."""

    def __init__(self, directory: Path):
        self.path = directory / "config.json"
        self.values = read_json(self.path)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``, or ``default``.

        Raises:
            UserError: the key is missing and has no default, or its value has another type.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.path} has no {key!r}; is the checkpoint complete?")
            return default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.path}: {key} should be {kind.__name__}, not {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(key, int, default)
        if value < 1:
            raise UserError(f"{self.path}: {key} must be at least 1, not {value}")
        return value

    def require(self, holds: bool, complaint: str) -> None:
        """Refuse the checkpoint unless ``holds``."""
        if not holds:
            raise UserError(f"{self.path}: {complaint}")

    @property
    def architecture(self) -> str:
        names = self.get("architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise UserError(f"{self.path}: architectures should name one class, not {names!r}")
        return names[0]


def read_rope(file: ConfigFile, head_size: int, max_position: int) -> dict:
    """Rope parameters from either spelling: ``rope_parameters`` (Transformers 5) or ``rope_theta`` with ``rope_scaling``.

    Raises:
        UserError: a kind of scaling that is not offered, or a parameter that makes no sense.
    """
    given = file.values.get("rope_parameters") or file.values.get("rope_scaling") or {}
    file.require(isinstance(given, dict), f"rope parameters should be an object, not {given!r:.60}")
    parameters = dict(given)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = file.values.get("rope_theta") or 10000.0
    inverse_frequencies(head_size, parameters, max_position)  # refuses before anything is loaded
    return parameters


def read_eos_ids(file: ConfigFile) -> tuple[int, ...]:
    """End-of-sequence ids: ``generation_config.json`` where there is one, as it is the chat-tuned list."""
    value = file.values.get("eos_token_id")
    generation = file.path.parent / "generation_config.json"
    if generation.exists():
        value = read_json(generation).get("eos_token_id", value)
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))
