"""ConfigFile: a checkpoint's ``config.json`` with typed access."""

from __future__ import annotations

import sys
from copy import copy
from typing import Any

from labinfer.base.errors import UserError
from labinfer.models.architectures import base_models
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
"""Bounds of sizes, by what their keys contain: a config is worked through before anybody sees that there are no such weights."""
FULL, SLIDING = "full_attention", "sliding_attention"


class ConfigFile:
    """``config.json``, or what a model file says in its place, with typed access; every error names the file and the key."""

    def __init__(self, files: ModelFiles):
        self._files, self.path = files, files.config_path
        self.values = files.config()

    def with_defaults(self, **defaults: Any) -> ConfigFile:
        """The same file, with a family's own values for keys that it leaves out; a null stays."""
        return self.with_values(defaults | self.values)

    def with_aliases(self, **names: str) -> ConfigFile:
        """The same file with Transformers' other names of keys: where a config has both, the value of the alias holds, as there.

        Args:
            names: key by alias.
        """
        given = {key: self.values[alias] for alias, key in names.items() if self.values.get(alias) is not None}
        return self.with_values(self.values | given)

    def without(self, *keys: str) -> ConfigFile:
        """The same file as if it left these keys out."""
        return self.with_values({key: value for key, value in self.values.items() if key not in keys})

    def with_values(self, values: dict[str, Any]) -> ConfigFile:
        """Other values under the same path."""
        file = copy(self)
        file.values = values
        return file

    def text_part(self) -> ConfigFile:
        """The text model of one that takes pictures as well: ``text_config``, but for its nulls, over the file's own values.

        Raises:
            UserError: it is not an object.
        """
        text = {key: value for key, value in self.get("text_config", dict, {}).items() if value is not None}
        outer = ("architectures", "tie_word_embeddings")
        return self.with_values(self.values | text | {key: self.values[key] for key in outer if key in self.values})

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``, or ``default``; a boolean that is null is false.

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
        """A positive whole number that some model could have."""
        value = self.get(key, int, default)
        most = next(bound for part, bound in MOST.items() if part in key)
        if not 1 <= value <= most:
            raise UserError(f"{self.path}: {key} must be from 1 to {most}, not {show_value(value)}")
        return value

    def require(self, holds: bool, complaint: str) -> None:
        """Refuse the checkpoint unless ``holds``."""
        if not holds:
            raise UserError(f"{self.path}: {complaint}")

    def end_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        return self._files.end_ids(self.values)

    @property
    def architecture(self) -> str:
        """Name of the family that runs the model."""
        names = self.get("architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise UserError(f"{self.path}: architectures should name one class, not {show_value(names)}")
        return base_models().get(names[0], names[0])

    @property
    def is_base_model(self) -> bool:
        """Whether ``architectures`` names a class without an output head."""
        return self.get("architectures", list)[0] in base_models()

    @property
    def head_size(self) -> int:
        """``head_dim``, or the hidden size over the heads where it is not given."""
        return self.size("head_dim", self.size("hidden_size") // self.size("num_attention_heads"))

    @property
    def max_position(self) -> int:
        """Positions that the checkpoint was made for."""
        return self.size("max_position_embeddings", 2048)


def show_value(value: Any) -> str:
    """A value as an error has it."""
    return f"{value!r:.60}"
