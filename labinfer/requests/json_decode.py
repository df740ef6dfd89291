"""decode_json: decodes JSON into a request struct, with errors that name the field and its value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import OTHER_NAMES, sampling_parameters

FIELD = re.compile(r"(?:at|in) `\$\.([A-Za-z_][A-Za-z0-9_]*)")
"""Pattern of msgspec's error message about an invalid field; the group is the field's name."""
UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`(?: - at `\$([^`]*)`)?")
WRONG_VALUE = re.compile(r"Invalid (?:enum )?value .* - at `\$([^`]*)`$")
"""Pattern of msgspec's error message about a value that is not in an enumeration; the group is the path of the value."""
WRONG_ENTRY = re.compile(r"(?:at `key` in `\$\.([A-Za-z_][A-Za-z0-9_]*)`|at `\$\.([A-Za-z_][A-Za-z0-9_]*)\[\.\.\.\]`)$")
"""Pattern of msgspec's error message about an invalid key or value in a field that is a map; the group is the field's name."""
STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]+)\]")
"""Pattern of one step of a path in msgspec's error messages: a field or an index."""
PROCESSORS = "logits_processors"
MAX_TEXT = 300
"""Maximum length, in characters, of msgspec's error message in an error for the client."""
MAX_IGNORED = 16
"""Maximum number of unknown fields that are ignored in a body; each of them costs decoding the body once more."""
SMALL_BYTES = 1 << 16
"""Length in bytes up to which a body is decoded without ``check_num_values``: decoding it takes milliseconds, whatever it
contains."""
MAX_PARTS = 1 << 18
"""Maximum number of objects, arrays and keys in a body. Decoding one takes about 0.5 µs, more than any other value."""
MAX_ITEMS = 1 << 20
"""Maximum number of commas in a body, which is about the number of its items and keys. A prompt of a million token ids is
allowed."""
COUNTED = b"{[:,"
"""JSON bytes that ``check_num_values`` counts outside of strings: a byte that begins an object or an array, or that follows a key
or an item."""
UNCOUNTED = bytes(set(range(256)) - {*COUNTED, *b'"'})
SCAN_BYTES = 1 << 20
"""Number of bytes that are scanned at a time, to bound the memory of the scan."""
Body = TypeVar("Body")


class WrongBody(UserError):
    """A body or line is invalid; the message says why.

    Args:
        field: name of the invalid field, if known.
    """

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


def decode_json(data: bytes | bytearray | msgspec.Raw, kind: type[Body], ignored: list[str] | None = None) -> Body:
    """Decode JSON into the struct ``kind``. An integer field accepts 5.0, as in JSON Schema. Fields with names in
    ``sampling_parameters`` are moved to ``logits_processors``, if ``kind`` has that field.

    Args:
        ignored: list to which the names of unknown fields are appended, which are then ignored; if None, unknown fields are
            refused.

    Raises:
        WrongBody: the data is not JSON, exceeds ``MAX_PARTS`` or ``MAX_ITEMS``, or has a field that is unknown or of a wrong type.
    """
    if memoryview(data).nbytes > SMALL_BYTES:
        check_num_values(data)
    has_whole_numbers, value = False, UNSET
    while True:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            text = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WrongBody(f"not valid JSON: {error}") from None
        unknown = UNKNOWN_FIELD.search(text)
        try:
            value = msgspec.json.decode(data) if value is UNSET else value
            if "got `float`" in text and not has_whole_numbers:
                has_whole_numbers, value = True, _whole_numbers(value)
            elif unknown and _move_parameters(value, kind):
                pass
            elif unknown and ignored is not None and len(ignored) < MAX_IGNORED and _delete_unknown(value, unknown):
                ignored.append(unknown[1][:MAX_TEXT])
            else:
                raise _describe(text + _wrong_entry(text, kind, value), kind)
            data = msgspec.json.encode(value)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            OverflowError,
            RecursionError,
        ):  # a syntax error after the first invalid field is reported as such
            raise _describe(text, kind) from None


def check_num_values(data: bytes | bytearray | msgspec.Raw) -> None:
    """Refuse JSON that would be slow to decode, because it has too many values. Counting them takes 10 ms for each MiB of ``data``.

    Raises:
        WrongBody: the data exceeds ``MAX_PARTS`` or ``MAX_ITEMS``.
    """
    data = bytes(data)
    if _fits(*_count_values(data)):
        return  # an upper bound, as it includes bytes in strings
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # escapes are gone, so each quote begins or ends a string
    num_parts, num_items, in_string = 0, 0, False
    for begin in range(0, len(data), SCAN_BYTES):
        part = data[begin : begin + SCAN_BYTES].translate(None, UNCOUNTED)
        # Two JSON strings are never adjacent, so two adjacent quotes are one string without counted bytes.
        pieces = part.replace(b'""', b"").split(b'"')
        parts, items = _count_values(b"".join(pieces[in_string::2]))
        num_parts, num_items = num_parts + parts, num_items + items
        in_string ^= len(pieces) % 2 == 0
        if not _fits(num_parts, num_items):
            raise WrongBody(
                f"the body has more than {MAX_PARTS} objects, arrays and keys, or more than {MAX_ITEMS} items; "
                "send a smaller request"
            )


def _count_values(data: bytes) -> tuple[int, int]:
    """Number of objects, arrays and keys in ``data`` (JSON), and number of commas. Bytes in strings are counted as if outside."""
    return sum(map(data.count, (b"{", b"[", b":"))), data.count(b",")


def _fits(num_parts: int, num_items: int) -> bool:
    return num_parts <= MAX_PARTS and num_items <= MAX_ITEMS


def _describe(text: str, kind: type) -> WrongBody:
    """Convert ``text``, a message of msgspec, to an error. Names that the client chose are escaped and shortened."""
    text = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[:MAX_TEXT]
    )
    if unknown := UNKNOWN_FIELD.search(text):
        name, place = unknown.groups()
        names = [*kind.__struct_fields__, *sampling_parameters()]
        other = OTHER_NAMES.get(name, "")
        near = [] if place else difflib.get_close_matches(name[:100], names, 1)
        hint = other if other.split(" ")[0].rstrip(",") in names and not place else near and repr(near[0])
        return WrongBody(f"{text}; did you mean {hint}?" if hint else text, name)
    field, place = FIELD.search(text), WRONG_VALUE.match(text)
    if place and (values := _listed_values(kind, place[1])):
        text += f"; use {'one of ' * (len(values) > 1)}{', '.join(values)}"
    return WrongBody(text, field and field[1])


def _wrong_entry(text: str, kind: type, value: Any) -> str:
    """Text that names the invalid key, to append to ``text`` (msgspec's error message), if that is about an entry of a map.
    Otherwise ""."""
    place = WRONG_ENTRY.search(text)
    name = place and (place[1] or place[2])
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    if not isinstance(value, dict) or not isinstance(value.get(name), dict) or name not in types:
        return ""
    entries = list(value[name].items())
    while len(entries) > 1:  # bisection: the first invalid entry is in the first half that is invalid
        half = entries[: len(entries) // 2]
        entries = half if _is_wrong(dict(half), types[name]) else entries[len(half) :]
    return f": {entries[0][0]!r:.60} is at fault" if entries and _is_wrong(dict(entries), types[name]) else ""


def _is_wrong(value: Any, kind: Any) -> bool:
    try:
        msgspec.json.decode(msgspec.json.encode(value), type=kind)
    except msgspec.ValidationError:
        return True
    return False


def _listed_values(kind: type, place: str) -> list[str]:
    """Allowed values, as JSON, at the path ``place`` of a request; empty if the schema of the request does not enumerate them."""
    schema = _schema(kind)

    def forms(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if reference := node.get("$ref"):
            yield from forms(schema["$defs"][reference.rpartition("/")[2]])
        yield node
        for each in node.get("anyOf", ()):
            yield from forms(each)

    nodes = [schema]
    for key, _ in STEP.findall(place):
        inner = [
            form.get("properties", {}).get(key) if key else form.get("items") for node in nodes for form in forms(node)
        ]
        nodes = [node for node in inner if isinstance(node, dict)]
    values = [value for node in nodes for form in forms(node) for value in form.get("enum", ())]
    return [msgspec.json.encode(value).decode() for value in dict.fromkeys(values) if value is not None]


@lru_cache(32)
def _schema(kind: type) -> dict[str, Any]:
    return msgspec.json.schema(kind)


def _move_parameters(value: Any, kind: type) -> bool:
    """Move fields with names in ``sampling_parameters`` to ``logits_processors``. Returns whether a field was moved."""
    if not isinstance(value, dict) or PROCESSORS not in kind.__struct_fields__:
        return False
    own = {name: value.pop(name) for name in sampling_parameters() if name in value}
    if own and isinstance(given := value.get(PROCESSORS) or {}, dict):  # any other type is refused by the next decode
        value[PROCESSORS] = given | {name: number for name, number in own.items() if number is not None}
    return bool(own)


def _delete_unknown(value: Any, unknown: re.Match) -> bool:
    """Delete from ``value`` the field that ``unknown``, a match in a message of msgspec, names. Returns whether the
    field was found."""
    name, place = unknown.groups()
    for key, index in STEP.findall(place or ""):
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(value, dict) and value.pop(name, value) is not value


def _whole_numbers(value: Any) -> Any:
    """Copy of a JSON value in which floats without a fraction, such as 5.0, are ints."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= 2**53 else value
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return {key: _whole_numbers(item) for key, item in value.items()} if isinstance(value, dict) else value
