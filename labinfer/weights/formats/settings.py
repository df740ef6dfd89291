"""Settings: a checkpoint's ``quantization_config`` with typed access."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.formats.format import TensorReader
from labinfer.weights.tensor_files import TensorFiles


class Settings:
    """An object of ``quantization_config``. Its errors name the key and its value; who reads the file adds the file's name.

    Args:
        directory: that of the checkpoint, if it may be asked for more than the config says.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "", directory: Path | None = None):
        self.values, self._prefix, self._directory = values, prefix, directory
        self.warnings: list[str] = []
        """Texts for the user, a line each."""

    @cached_property
    def tensors(self) -> TensorReader | None:
        """The checkpoint's tensors; None where it has none (yet), or broken ones, of which its reader will tell."""
        try:
            return TensorFiles(self._directory) if self._directory is not None else None
        except UserError:
            return None

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of a key, or ``default`` where it is missing or null.

        Raises:
            UserError: it has another type.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self._prefix}{key} should be {kind.__name__}, not {value!r:.60}")
        return value

    def choose(self, key: str, supported: Sequence[Any], default: Any = None) -> Any:
        """The value of a key, or ``default``, if it is supported.

        Raises:
            UserError: it is not.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if not any(value == known and type(value) is type(known) for known in supported):
            names = ", ".join("none" if known is None else str(known) for known in supported)
            raise UserError(f"{self._prefix}{key} {value!r:.60} is not supported; supported: {names}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where it is missing.

        Raises:
            UserError: it is something else.
        """
        values = self.get(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{self._prefix}{key} should be a list of names, not {values!r:.60}")
        return tuple(values)

    def inner(self, key: str, defaults: Settings | None = None) -> Settings:
        """The settings of an object inside.

        Args:
            defaults: where values are taken from that it leaves out.

        Raises:
            UserError: it is no object.
        """
        values = self.values.get(key)
        if not isinstance(values, dict):
            raise UserError(f"{self._prefix}{key} should be an object, not {values!r:.60}")
        return Settings((defaults.values if defaults else {}) | values, f"{self._prefix}{key}.")

    def warn(self, text: str) -> None:
        """Tell the user once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def group_size(self, key: str, default: int) -> int:
        """Inputs that share a scale; 0 for all, which is written -1.

        Raises:
            UserError: it is not a multiple of 16.
        """
        size = self.get(key, int, default)
        if size == -1:
            return 0
        if size < 16 or size % 16:
            raise UserError(
                f"{self._prefix}{key} {size} is not supported; supported: multiples of 16, or -1 for all inputs"
            )
        return size


class Excluded:
    """Modules that were not quantised, as Transformers reads ``modules_to_not_convert``.

    A name or regular expression means every module whose path begins with it and goes on with another segment or not at all, and
    every module whose path ends with it, be it inside of a segment.

    Source: ``should_convert_module`` in transformers/quantizers/quantizers_utils.py.
    """

    def __init__(self, names: Sequence[str]):
        self._ends = tuple(names)
        self._patterns = [pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names]

    def matches(self, matrix: str) -> bool:
        return any(
            path.endswith(self._ends) or any(pattern.match(path) for pattern in self._patterns)
            for path in spellings(matrix)
        )


class Targets:
    """Modules that compressed-tensors names: by their paths, by regular expressions after ``re:``, or by their class.

    Source: vllm-project/compressed-tensors, utils/match.py.
    """

    def __init__(self, names: Sequence[str]):
        self.has_linear = "Linear" in names
        """Whether all linear layers are meant that no other scheme names."""
        self._paths = frozenset(names)
        self._patterns = [pattern(name.removeprefix("re:")) for name in names if name.startswith("re:")]

    def matches(self, matrix: str) -> bool:
        """Whether a module is named, as itself or by a regular expression."""
        return any(
            path in self._paths or any(pattern.match(path) for pattern in self._patterns) for path in spellings(matrix)
        )


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression; what is none fits nothing."""
    try:
        return re.compile(text)
    except re.error:
        return re.compile(r"(?!)")


def spellings(matrix: str) -> Iterator[str]:
    """A path, and the same as a text model has it that stands alone, and as older versions of Transformers have it inside of
    another: whoever wrote the config may have had any of these in memory.
    """
    yield matrix
    alone = re.sub(r"(?<![^.])language_model\.", "", matrix)
    for path in (alone, f"language_model.{alone}", re.sub(r"^model\.", "model.language_model.", alone)):
        if path != matrix:
            yield path


def is_table(matrix: str) -> bool:
    """Whether a matrix is the table of token embeddings, which none of these methods quantises."""
    return matrix.rpartition(".")[2].startswith("embed")
