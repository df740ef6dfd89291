"""GgufFile: metadata and tensor positions of a GGUF file. Does not import torch.

All sizes are checked against the file size before memory is allocated. Arrays of the metadata, such as a vocabulary, are skipped and
read on demand. Split files are read as one.

Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from labinfer.base.errors import UserError
from labinfer.weights.gguf.header import SCALARS, STRING, Array, GgufTensor, Header, describe_value

T = TypeVar("T")
SUFFIX = ".gguf"
BYTE_TYPES = (0, 1)
"""Numbers of the metadata types that take one byte: uint8 and int8."""
MAX_ARRAY = 1 << 28
"""Maximum size of an array that is read, in bytes."""
MAX_NUMBERS = 1 << 24
"""Maximum number of elements of a numeric array; a Python list takes tens of bytes for each."""
MAX_SPLITS = 1 << 12
SHARED_KEYS = ("general.architecture", "general.name", "split.tensors.count")
"""Metadata keys that must agree between split files, if present."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def is_gguf(model: Path) -> bool:
    """Whether a model's path is that of a GGUF file, by its name."""
    return model.suffix == SUFFIX and not model.is_dir()


def split_paths(path: Path) -> list[Path]:
    """Paths of all split files of a model, given the only or first file.

    Raises:
        UserError: ``path`` is a split file, but not the first.
    """
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match.groups()
    if int(number) != 1 or not 1 <= int(count) <= MAX_SPLITS:
        raise UserError(
            f"--model {path} is part {int(number)} of a model of {int(count)} files; give the first, "
            f"{stem}-00001-of-{count}.gguf"
        )
    return [path.with_name(f"{stem}-{index:05}-of-{count}.gguf") for index in range(1, int(count) + 1)]


def tensors_in(path: Path) -> list[GgufTensor]:
    """Tensors of one file, which may be one of several split files.

    Raises:
        UserError: the file is broken, or has a tensor of an unsupported type.
    """
    return Header(path).tensors


class GgufFile:
    """Metadata and tensors of a model in GGUF. The metadata of the first split file is used.

    Args:
        path: path of the only or first file.

    Raises:
        UserError: a file is missing, broken or of another model, or has a tensor of an unsupported type.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, GgufTensor] = {}
        paths = split_paths(path)
        for index, part in enumerate(paths):
            header = Header(part)
            if index == 0:
                self._file, self._values = header.file, header.values
            self._check_part(part, header.values, index, len(paths))
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    raise UserError(f"{part}: tensor {tensor.name!r:.80} occurs twice; download the model again")
                self.tensors[tensor.name] = tensor
        if (count := self.get("split.tensors.count", int, len(self.tensors))) != len(self.tensors):
            raise UserError(
                f"{path} and the files beside it have {len(self.tensors)} tensors, but should have {count}; download the model again"
            )

    def _check_part(self, part: Path, values: dict[str, Any], index: int, num_parts: int) -> None:
        """Refuse a file ``part`` whose metadata does not say that it is part ``index`` of ``num_parts`` of this model."""
        if index == 0 and (count := self.get("split.count", int, 1)) > 1 and count != num_parts:
            raise UserError(
                f"{part} is one of {count} files; give the first of them under the name that ends in -00001-of-{count:05}.gguf"
            )
        own = {"split.no": index, "split.count": num_parts} | {key: self._values.get(key) for key in SHARED_KEYS}
        for key, expected in own.items():
            if expected is not None and values.get(key, expected) != expected:
                raise UserError(
                    f"{part} is not part {index + 1} of {num_parts} of {self.path.name}: its {key} is {describe_value(values[key])}, not "
                    f"{describe_value(expected)}; download it again"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def prefix(self) -> str:
        """``general.architecture``, the first part of the architecture's metadata keys."""
        return self.get("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Metadata value of a key, or ``default``.

        Raises:
            UserError: the key is missing and has no default, or has another type.
        """
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.path} has no {key!r} in its metadata; is the file complete?")
            return default
        if kind is float and type(value) is int:
            return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.path}: {key} should be {kind.__name__}, not {describe_value(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Integer value of a key. The value may also be an array with a number for each layer, if all are equal.

        Raises:
            UserError: the value differs between layers, or is not an integer.
        """
        try:
            return self.get(key, int, default)
        except UserError:
            numbers = self.numbers(key)
            if not numbers:
                raise
            if len(set(numbers)) == 1 and type(numbers[0]) is not int:
                raise
            if len(set(numbers)) > 1:
                raise UserError(f"{self.path}: {key} differs between layers, which is not supported") from None
            return numbers[0]

    def sizes_by_layer(self, key: str, num_layers: int) -> list[int]:
        """Integer of a key for each layer. The value may also be one number for all layers.

        Raises:
            UserError: the key is missing, or is not an integer or a list of at least ``num_layers`` integers.
        """
        if key not in self:
            self.get(key, int)
        numbers = self.numbers(key)
        numbers = numbers * num_layers if len(numbers) == 1 else numbers[:num_layers]
        if len(numbers) != num_layers or any(type(number) is not int for number in numbers):
            raise UserError(f"{self.path}: {key} should be an integer, or a list of {num_layers} integers")
        return numbers

    def numbers(self, key: str) -> list[int | float | bool]:
        """Array of numbers (a single number becomes a list of one); empty if the key is missing.

        Raises:
            UserError: the value has another type, or is too long.
        """
        value = self._values.get(key)
        if isinstance(value, (int, float)):
            return [value]
        array = self._array(key, SCALARS, "numbers")
        if array is None:
            return []
        if array.count > MAX_NUMBERS:
            raise UserError(f"{self.path}: {key} has {array.count} numbers; {MAX_NUMBERS} are supported")
        return list(struct.unpack(f"<{array.count}{SCALARS[array.kind]}", self._read(key, array)))

    def texts(self, key: str) -> list[str]:
        """Array of strings; empty if the key is missing. Invalid UTF-8 becomes U+FFFD.

        Raises:
            UserError: the value has another type, or is too long.
        """
        array = self._array(key, (STRING,), "a list of strings")
        if array is None:
            return []
        data, position, texts = self._read(key, array), 0, []
        for _ in range(array.count):
            begin = position + 8
            position = begin + int.from_bytes(data[position:begin], "little")
            texts.append(data[begin:position].decode(errors="replace"))
        return texts

    def raw_bytes(self, key: str) -> bytes:
        """Array of bytes; empty if the key is missing.

        Raises:
            UserError: the value has another type, or is too long.
        """
        array = self._array(key, BYTE_TYPES, "bytes")
        return b"" if array is None else self._read(key, array)

    def _array(self, key: str, kinds: Collection[int], what: str) -> Array | None:
        """Array of ``key``, with elements of one of the types ``kinds``; None if the key is missing or the array is
        empty."""
        value = self._values.get(key)
        if value is None or (isinstance(value, Array) and not value.count):
            return None
        if not isinstance(value, Array) or value.kind not in kinds:
            raise UserError(f"{self.path}: {key} should be {what}, not {describe_value(value)}")
        return value

    def _read(self, key: str, array: Array) -> bytes:
        size = array.end - array.position
        if size > MAX_ARRAY:
            raise UserError(f"{self.path}: {key} has {size} bytes; {MAX_ARRAY} are supported")
        self._file.seek(array.position)
        data = self._file.read(size)
        if len(data) < size:
            raise UserError(f"{self.path} is truncated; download it again")
        return data
