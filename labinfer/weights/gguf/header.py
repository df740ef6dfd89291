"""``Header``: the header of one GGUF file, with its metadata and the positions of its tensors. Does not import torch.

All sizes are checked against the file size before memory is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from labinfer.base.errors import UserError
from labinfer.weights.gguf.types import TYPES, UNSUPPORTED_TYPES, BlockType
from labinfer.weights.json_file import need_plain_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""``struct`` format characters of the metadata's number types."""
STRING, ARRAY = 8, 9
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 18
MAX_NAME = 1 << 16
"""Maximum length of a key or of a tensor's name in bytes."""
MAX_TEXT = 16 << 20
"""Maximum length of a string, such as a chat template, in bytes."""
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
CHUNK = 1 << 20
"""Number of bytes that are read from the file at a time."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Position, type and shape of a tensor in a GGUF file."""

    name: str
    file: BinaryIO
    path: Path
    position: int
    """Offset of the first byte in the file."""
    shape: tuple[int, ...]
    """Row-major shape: the inputs of a matrix come last (the file has the reverse order)."""
    type: BlockType
    rows_together: int = 0
    """Number of rows that are contiguous in the file; 0 if all are."""
    pitch: int = 0
    """Bytes from the start of ``rows_together`` contiguous rows to the start of the next ``rows_together`` rows."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row (along the last dimension)."""
        return self.shape[-1] // self.type.size * self.type.num_bytes

    def offset(self, row: int) -> int:
        """Bytes from ``position`` to row ``row``. Rows are counted over all dimensions but the last."""
        number, row = divmod(row, self.rows_together) if self.rows_together else (0, row)
        return number * self.pitch + row * self.row_bytes


@dataclass(frozen=True)
class Array:
    """Type, length and position in the file of a metadata array."""

    position: int
    end: int
    kind: int
    count: int


class Header:
    """Header of a GGUF file, read on construction.

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
        except BrokenFile as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None

    def _read(self) -> None:
        if self._take(4) != MAGIC:
            raise BrokenFile("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            what = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
            raise BrokenFile(f"it {what}; only versions 2 and 3, little-endian, are supported")
        num_tensors, num_keys = self._count(MAX_TENSORS, "tensors"), self._count(MAX_KEYS, "keys")
        for _ in range(num_keys):
            key = self._text(MAX_NAME)
            if key in self.values:
                raise BrokenFile(f"{key!r:.60} is in its metadata twice")
            self.values[key] = self._value(key)
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise BrokenFile(f"general.alignment is {describe_value(alignment)}")
        first = -(-self._position // alignment) * alignment
        for name, shape, kind, offset in entries:
            tensor = GgufTensor(
                name=name, file=self.file, path=self._path, position=first + offset, shape=shape, type=kind
            )
            if tensor.position + math.prod(shape[:-1]) * tensor.row_bytes > self._size:
                raise BrokenFile(f"it ends before tensor {name!r:.80}; download it again")
            self.tensors.append(tensor)

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._text(MAX_TEXT)
        if kind != ARRAY:
            raise BrokenFile(f"{key!r:.60} in its metadata is of an unknown kind, {kind}")
        kind, count = self._number("I"), self._number("Q")
        begin = self._position
        if kind in SCALARS:
            self._skip(count * struct.calcsize(SCALARS[kind]))
        elif kind == STRING:
            self._skip_texts(count)
        else:
            raise BrokenFile(f"{key!r:.60} in its metadata is an array of kind {kind}")
        return Array(begin, self._position, kind, count)

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, num_dimensions = self._text(MAX_NAME), self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise BrokenFile(f"tensor {name!r:.80} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            raise BrokenFile(
                f"tensor {name!r:.80} is of type {UNSUPPORTED_TYPES.get(number, number)}, which is not supported; supported are "
                f"{', '.join(kind.name for kind in TYPES.values())}"
            )
        kind = TYPES[number]
        if not all(shape) or max(shape) >= 1 << 48 or shape[-1] % kind.size:
            raise BrokenFile(f"tensor {name!r:.80} of type {kind.name} has shape {list(shape)}")
        return name, shape, kind, offset

    def _count(self, most: int, what: str) -> int:
        count = self._number("Q")
        if count > most:
            raise BrokenFile(f"it claims {count} {what}; the limit is {most}")
        return count

    def _number(self, kind: str) -> int | float | bool:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind)))[0]

    def _text(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise BrokenFile(f"a string in its metadata claims {length} bytes; the limit is {most}")
        return self._take(length).decode(errors="replace")

    def _take(self, count: int) -> bytes:
        offset = self._position - self._start
        if offset + count > len(self._buffer):
            self._fill(count)
            offset = 0
        self._position += count
        return self._buffer[offset : offset + count]

    def _fill(self, count: int) -> None:
        """Fill the buffer with at least ``count`` bytes from the current position in the file."""
        if count > self._size - self._position:
            raise BrokenFile("it ends too early; download it again")
        self.file.seek(self._position)
        self._start, self._buffer = self._position, self.file.read(max(count, CHUNK))
        if len(self._buffer) < count:
            raise BrokenFile("it is truncated; download it again")

    def _skip(self, count: int) -> None:
        if count > self._size - self._position:
            raise BrokenFile("it ends too early; download it again")
        self._position += count

    def _skip_texts(self, count: int) -> None:
        """Skip ``count`` strings without decoding them: a vocabulary has hundreds of thousands, which most ranks do not need."""
        if count > (self._size - self._position) // 8:
            raise BrokenFile("it ends too early; download it again")
        length_at: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
        offset = self._position - self._start
        for _ in range(count):
            if offset + 8 > len(self._buffer):
                self._position = self._start + offset
                self._fill(8)
                offset = 0
            offset += 8 + length_at(self._buffer, offset)[0]
            if self._start + offset > self._size:
                raise BrokenFile("it ends too early; download it again")
        self._position = self._start + offset


class BrokenFile(Exception):
    """Unreadable file; the message says why."""


def describe_value(value: Any) -> str:
    return f"an array of {value.count}" if isinstance(value, Array) else f"{value!r:.60}"
