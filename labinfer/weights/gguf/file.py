"""GgufFile: metadata and tensor positions of a GGUF file; no torch.

All sizes are checked against the file size before memory is allocated. Arrays of the metadata, such as a vocabulary, are skipped and
read on demand. Split files are read as one.

Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from labinfer.base.errors import UserError
from labinfer.weights.gguf.types import OTHERS, TYPES, BlockType
from labinfer.weights.json_file import need_plain_file

T = TypeVar("T")
SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""``struct`` format characters of the metadata's number types."""
BYTES = (0, 1)
"""Metadata types of one byte: uint8 and int8."""
STRING, ARRAY = 8, 9
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 18
MAX_NAME = 1 << 16
"""Maximum length of a key or of a tensor's name in bytes."""
MAX_TEXT = 16 << 20
"""Maximum length of a string, such as a chat template, in bytes."""
MAX_ARRAY = 1 << 28
"""Maximum size of an array that is read, in bytes."""
MAX_NUMBERS = 1 << 24
"""Maximum number of elements of a numeric array; a Python list takes tens of bytes for each."""
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_SPLITS = 1 << 12
CHUNK = 1 << 20
"""Number of bytes that are read from the file at a time."""
SHARED_KEYS = ("general.architecture", "general.name", "split.tensors.count")
"""Metadata keys that must agree between split files, if present."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Position and layout of a tensor in a file."""

    name: str
    file: BinaryIO
    path: Path
    position: int
    """Offset of the first byte in the file."""
    shape: tuple[int, ...]
    """Row-major shape: the inputs of a matrix come last, unlike in the file."""
    type: BlockType
    rows_together: int = 0
    """Number of rows that are contiguous in the file; 0 if all are."""
    pitch: int = 0
    """Bytes from the first of ``rows_together`` contiguous rows to the first of the next ones."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row (along the last dimension)."""
        return self.shape[-1] // self.type.size * self.type.num_bytes

    def offset(self, row: int) -> int:
        """Bytes from ``position`` to a row; rows are counted over all leading dimensions."""
        number, row = divmod(row, self.rows_together) if self.rows_together else (0, row)
        return number * self.pitch + row * self.row_bytes


@dataclass(frozen=True)
class _Array:
    """Type, length and position in the file of a metadata array."""

    position: int
    end: int
    kind: int
    count: int


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
    return _Header(path).tensors


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
            header = _Header(part)
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
        """Refuse a file whose metadata says that it is another part, or a part of another model."""
        if index == 0 and (count := self.get("split.count", int, 1)) > 1 and count != num_parts:
            raise UserError(
                f"{part} is one of {count} files; give the first of them under the name that ends in -00001-of-{count:05}.gguf"
            )
        own = {"split.no": index, "split.count": num_parts} | {key: self._values.get(key) for key in SHARED_KEYS}
        for key, expected in own.items():
            if expected is not None and values.get(key, expected) != expected:
                raise UserError(
                    f"{part} is not part {index + 1} of {num_parts} of {self.path.name}: its {key} is {_show(values[key])}, not "
                    f"{_show(expected)}; download it again"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._values

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
            raise UserError(f"{self.path}: {key} should be {kind.__name__}, not {_show(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Integer value of a key; also accepts an array for all layers with equal values.

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
        array = self._array(key, BYTES, "bytes")
        return b"" if array is None else self._read(key, array)

    def _array(self, key: str, kinds: Collection[int], what: str) -> _Array | None:
        """Array of ``key``, with elements of one of the types ``kinds``; None if the key is missing or the array is
        empty."""
        value = self._values.get(key)
        if value is None or (isinstance(value, _Array) and not value.count):
            return None
        if not isinstance(value, _Array) or value.kind not in kinds:
            raise UserError(f"{self.path}: {key} should be {what}, not {_show(value)}")
        return value

    def _read(self, key: str, array: _Array) -> bytes:
        size = array.end - array.position
        if size > MAX_ARRAY:
            raise UserError(f"{self.path}: {key} has {size} bytes; {MAX_ARRAY} are supported")
        self._file.seek(array.position)
        data = self._file.read(size)
        if len(data) < size:
            raise UserError(f"{self.path} is truncated; download it again")
        return data


def _show(value: Any) -> str:
    return f"an array of {value.count}" if isinstance(value, _Array) else f"{value!r:.60}"


class _Broken(Exception):
    """Unreadable file; the message says why."""


class _Header:
    """Header of a GGUF file.

    Raises:
        UserError: the file cannot be read, or is not a GGUF file.
    """

    def __init__(self, path: Path):
        self.values: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        self._path, self._position, self._start, self._buffer = path, 0, 0, b""
        need_plain_file(path)
        try:
            self.file: BinaryIO = open(path, "rb")  # noqa: SIM115 - as long as its tensors
            self._size = self.file.seek(0, 2)
            self._read()
        except FileNotFoundError:
            raise UserError(f"{path} is missing; is the model complete?") from None
        except _Broken as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None

    def _read(self) -> None:
        if self._take(4) != MAGIC:
            raise _Broken("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            what = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
            raise _Broken(f"it {what}; only versions 2 and 3, little-endian, are supported")
        num_tensors, num_keys = self._count(MAX_TENSORS, "tensors"), self._count(MAX_KEYS, "keys")
        for _ in range(num_keys):
            key = self._text(MAX_NAME)
            if key in self.values:
                raise _Broken(f"{key!r:.60} is in its metadata twice")
            self.values[key] = self._value(key)
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise _Broken(f"general.alignment is {_show(alignment)}")
        first = -(-self._position // alignment) * alignment
        for name, shape, kind, offset in entries:
            tensor = GgufTensor(
                name=name, file=self.file, path=self._path, position=first + offset, shape=shape, type=kind
            )
            if tensor.position + math.prod(shape[:-1]) * tensor.row_bytes > self._size:
                raise _Broken(f"it ends before tensor {name!r:.80}; download it again")
            self.tensors.append(tensor)

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._text(MAX_TEXT)
        if kind != ARRAY:
            raise _Broken(f"{key!r:.60} in its metadata is of an unknown kind, {kind}")
        kind, count = self._number("I"), self._number("Q")
        begin = self._position
        if kind in SCALARS:
            self._skip(count * struct.calcsize(SCALARS[kind]))
        elif kind == STRING:
            self._skip_texts(count)
        else:
            raise _Broken(f"{key!r:.60} in its metadata is an array of kind {kind}")
        return _Array(begin, self._position, kind, count)

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, num_dimensions = self._text(MAX_NAME), self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise _Broken(f"tensor {name!r:.80} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            raise _Broken(
                f"tensor {name!r:.80} is of type {OTHERS.get(number, number)}, which is not supported; supported are "
                f"{', '.join(kind.name for kind in TYPES.values())}"
            )
        kind = TYPES[number]
        if not all(shape) or max(shape) >= 1 << 48 or shape[-1] % kind.size:
            raise _Broken(f"tensor {name!r:.80} of type {kind.name} has shape {list(shape)}")
        return name, shape, kind, offset

    def _count(self, most: int, what: str) -> int:
        count = self._number("Q")
        if count > most:
            raise _Broken(f"it claims {count} {what}; the limit is {most}")
        return count

    def _number(self, kind: str) -> int | float | bool:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind)))[0]

    def _text(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise _Broken(f"a string in its metadata claims {length} bytes; the limit is {most}")
        return self._take(length).decode(errors="replace")

    def _take(self, count: int) -> bytes:
        offset = self._position - self._start
        if offset + count > len(self._buffer):
            self._fill(count)
            offset = 0
        self._position += count
        return self._buffer[offset : offset + count]

    def _fill(self, count: int) -> None:
        """Fill the buffer with at least ``count`` bytes from the current position of the file."""
        if count > self._size - self._position:
            raise _Broken("it ends too early; download it again")
        self.file.seek(self._position)
        self._start, self._buffer = self._position, self.file.read(max(count, CHUNK))
        if len(self._buffer) < count:
            raise _Broken("it is truncated; download it again")

    def _skip(self, count: int) -> None:
        if count > self._size - self._position:
            raise _Broken("it ends too early; download it again")
        self._position += count

    def _skip_texts(self, count: int) -> None:
        """Skip strings: a vocabulary has hundreds of thousands, which most ranks do not need."""
        if count > (self._size - self._position) // 8:
            raise _Broken("it ends too early; download it again")
        length_at: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
        offset = self._position - self._start
        for _ in range(count):
            if offset + 8 > len(self._buffer):
                self._position = self._start + offset
                self._fill(8)
                offset = 0
            offset += 8 + length_at(self._buffer, offset)[0]
            if self._start + offset > self._size:
                raise _Broken("it ends too early; download it again")
        self._position = self._start + offset
