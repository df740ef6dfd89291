"""ConfigFile: a checkpoint's ``config.json`` with typed access."""

from __future__ import annotations

import sys
from copy import copy
from typing import Any

from labinfer.base.errors import UserError
from labinfer.models.architectures import base_models, classifiers
from labinfer.weights.model_files import ModelFiles

MOST = {
    "layers": 1 << 10,
    "heads": 1 << 12,
    "experts": 1 << 12,
    "_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 24,
    "": 1 << 31,
}
"""Upper bounds of sizes, by a part of their config key. They reject absurd sizes at once; otherwise layers would be built at length before
the missing weights are noticed."""
FULL, SLIDING = "full_attention", "sliding_attention"


class ConfigFile:
    """Typed access to ``config.json``, or to a model file's equivalent metadata; every error names the file and the key."""

    def __init__(self, files: ModelFiles):
        self._files, self.path = files, files.config_path
        self.values = files.config()

    def with_defaults(self, **defaults: Any) -> ConfigFile:
        """A copy with a family's default values for missing keys; a null is kept."""
        return self.with_values(defaults | self.values)

    def with_aliases(self, **names: str) -> ConfigFile:
        """A copy in which each alias of Transformers sets the key that it stands for. If a config has both, the alias takes precedence, as in Transformers.

        Args:
            names: alias → key.
        """
        given = {key: self.values[alias] for alias, key in names.items() if self.values.get(alias) is not None}
        return self.with_values(self.values | given)

    def without(self, *keys: str) -> ConfigFile:
        """A copy without ``keys``."""
        return self.with_values({key: value for key, value in self.values.items() if key not in keys})

    def with_values(self, values: dict[str, Any]) -> ConfigFile:
        """A copy with ``values`` in place of all values."""
        file = copy(self)
        file.values = values
        return file

    def text_part(self) -> ConfigFile:
        """Config of a multimodal model's text part: the outer values, overridden by the values of ``text_config`` that are not null.

        Raises:
            UserError: ``text_config`` is not an object.
        """
        text = {key: value for key, value in self.get("text_config", dict, {}).items() if value is not None}
        outer = ("architectures", "tie_word_embeddings")
        return self.with_values(self.values | text | {key: self.values[key] for key in outer if key in self.values})

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of ``key``, or ``default``; a null boolean is False.

        Raises:
            UserError: the key is missing and has no default, or its value has another type.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.path} has no {key!r}; is the checkpoint complete?")
            return False if kind is bool and key in self.values else default  # a null is false in Transformers
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.path}: {key} should be {kind.__name__}, not {show_value(value)}")
        if kind is float and not abs(value) <= sys.float_info.max:
            raise UserError(f"{self.path}: {key} should be a finite number, not {show_value(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Value of ``key``, a positive integer up to the bound in ``MOST``; ``default`` if it is missing."""
        value = self.get(key, int, default)
        most = next(bound for part, bound in MOST.items() if part in key)
        if not 1 <= value <= most:
            raise UserError(f"{self.path}: {key} must be from 1 to {most}, not {show_value(value)}")
        return value

    def require(self, holds: bool, complaint: str) -> None:
        """Raise a ``UserError`` with ``complaint`` unless ``holds``."""
        if not holds:
            raise UserError(f"{self.path}: {complaint}")

    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end generation (EOS)."""
        return self._files.end_ids(self.values)

    @property
    def architecture(self) -> str:
        """Class name in ``architectures``, under which the model's family is registered."""
        names = self.get("architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise UserError(f"{self.path}: architectures should name one class, not {show_value(names)}")
        return (base_models() | classifiers()).get(names[0], names[0])

    @property
    def is_base_model(self) -> bool:
        """Whether ``architectures`` names a class without an LM head."""
        return self.get("architectures", list)[0] in base_models() | classifiers()

    @property
    def head_size(self) -> int:
        """``head_dim``; by default the hidden size divided by the number of heads."""
        return self.size("head_dim", self.size("hidden_size") // self.size("num_attention_heads"))

    @property
    def max_position(self) -> int:
        """Context length of the checkpoint."""
        return self.size("max_position_embeddings", 2048)


def show_value(value: Any) -> str:
    """Text of ``value``, shortened for an error message."""
    return f"{value!r:.60}"
