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
    """JSON object: ``quantization_config`` or an object in it. Error messages name the key and its value; the caller adds the file.

    Args:
        directory: directory of the checkpoint, if its tensors may be inspected.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "", directory: Path | None = None):
        self.values, self._prefix, self._directory = values, prefix, directory
        self.warnings: list[str] = []
        """Warnings to the user, one line each."""

    @cached_property
    def tensors(self) -> TensorReader | None:
        """Reader of the checkpoint's tensors; None if they are missing or broken, which the loader reports."""
        try:
            return TensorFiles(self._directory) if self._directory is not None else None
        except UserError:
            return None

    def get(self, key: str, kind: type, default: Any) -> Any:
        """Value of a key, or ``default`` if it is missing or null.

        Raises:
            UserError: the value has another type.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self._prefix}{key} should be {kind.__name__}, not {value!r:.60}")
        return value

    def choose(self, key: str, supported: Sequence[Any], default: Any = None) -> Any:
        """Value of a key, or ``default`` if the key is missing, checked to be in ``supported``.

        Raises:
            UserError: the value is not supported.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if not any(value == known and type(value) is type(known) for known in supported):
            names = ", ".join("none" if known is None else str(known) for known in supported)
            raise UserError(f"{self._prefix}{key} {value!r:.60} is not supported; supported: {names}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Value of ``key``, a list of strings; empty if the key is missing.

        Raises:
            UserError: the value is not a list of strings.
        """
        values = self.get(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{self._prefix}{key} should be a list of names, not {values!r:.60}")
        return tuple(values)

    def inner(self, key: str, defaults: Settings | None = None) -> Settings:
        """Settings of the object at ``key``.

        Args:
            defaults: settings whose values are used for missing keys.

        Raises:
            UserError: the value is not an object.
        """
        values = self.values.get(key)
        if not isinstance(values, dict):
            raise UserError(f"{self._prefix}{key} should be an object, not {values!r:.60}")
        return Settings((defaults.values if defaults else {}) | values, f"{self._prefix}{key}.")

    def warn(self, text: str) -> None:
        """Add a warning to the user, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def group_size(self, key: str, default: int) -> int:
        """Group size (inputs that share a scale); 0 for all inputs, which configs write as -1.

        Raises:
            UserError: the value is not a multiple of 16.
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
    """Unquantized modules by ``modules_to_not_convert``, matched as in Transformers.

    A name or regular expression matches every module whose path begins with it (up to a segment boundary), and every module whose path
    ends with it (also inside a segment).

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
    """Modules that a scheme of compressed-tensors targets: by path, by regular expression (``re:``), or by class name.

    Source: vllm-project/compressed-tensors, utils/match.py.
    """

    def __init__(self, names: Sequence[str]):
        self.has_linear = "Linear" in names
        """Whether the scheme targets all linear layers that no other scheme names."""
        self._paths = frozenset(names)
        self._patterns = [pattern(name.removeprefix("re:")) for name in names if name.startswith("re:")]

    def matches(self, matrix: str) -> bool:
        """Whether the scheme targets a matrix by its path or by a regular expression."""
        return any(
            path in self._paths or any(pattern.match(path) for pattern in self._patterns) for path in spellings(matrix)
        )


def pattern(text: str) -> re.Pattern[str]:
    """Compiled regular expression; if ``text`` is invalid, one that matches nothing."""
    try:
        return re.compile(text)
    except re.error:
        return re.compile(r"(?!)")


def spellings(matrix: str) -> Iterator[str]:
    """Names that a config may use for a matrix: its path, and its path in a text-only model and in older versions of
    Transformers."""
    yield matrix
    alone = re.sub(r"(?<![^.])language_model\.", "", matrix)
    for path in (alone, f"language_model.{alone}", re.sub(r"^model\.", "model.language_model.", alone)):
        if path != matrix:
            yield path


def is_table(matrix: str) -> bool:
    """Whether ``matrix`` is the token embedding, which quantized checkpoints leave unquantized."""
    return matrix.rpartition(".")[2].startswith("embed")
