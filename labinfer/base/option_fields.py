"""option: makes a dataclass field that is also a command-line flag. Values are converted and checked here."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from labinfer.base.errors import UserError

Section = typing.TypeVar("Section")
"""A dataclass whose fields are options: one section of the configuration."""


def option(
    default: Any,
    help: str,
    *,
    other_name: str | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    least: int = 0,
    secret: bool = False,
    spellings: Mapping[str, str] | None = None,
):
    """Make a dataclass field that is also a command-line flag (``max_num_seqs`` → ``--max-num-seqs``).

    Args:
        help: text for ``--help``.
        other_name: a second, shorter flag.
        choices: allowed strings. An option with ``on`` and ``off`` among them also takes True and False, and its flag can be
            given alone and with ``--no-``.
        metavar: name of the value in ``--help``.
        least: minimum of a numeric option.
        secret: whether to omit the value where options are printed.
        spellings: maps other spellings of a value to that value, such as ``fp16`` to ``float16``.
    """
    metadata = {"help": help, "other_name": other_name, "choices": choices, "metavar": metavar, "least": least}
    metadata["spellings"] = spellings or {}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def convert_section(section: type[Section], values: dict[str, Any]) -> Section:
    """Make a section of options from flag values.

    Raises:
        UserError: a value cannot be converted to its option's type.
    """
    hints, fields = typing.get_type_hints(section), {f.name: f for f in dataclasses.fields(section)}
    texts = {
        key: "on" if value else "off"
        for key, value in values.items()
        if isinstance(value, bool) and is_switch(fields[key])
    }
    converted = {key: convert(key, value, hints[key]) for key, value in (values | texts).items()}
    for key, value in converted.items():
        if spellings := fields[key].metadata["spellings"]:
            is_tuple = isinstance(value, tuple)
            converted[key] = tuple(spellings.get(v, v) for v in value) if is_tuple else spellings.get(value, value)
    return section(**converted)


def is_switch(field: dataclasses.Field) -> bool:
    """Whether an option is a switch: ``on`` and ``off`` are among its choices."""
    return {"on", "off"} <= set(field.metadata["choices"] or ())


def check_bounds(section: Any) -> None:
    """Check the values of a section against ``choices`` and ``least`` of its options. A number may be infinite only if
    that is its default.

    Raises:
        UserError: a value is out of bounds.
    """
    for f in dataclasses.fields(section):
        choices, least, value = f.metadata["choices"], f.metadata["least"], getattr(section, f.name)
        if choices and value not in choices:
            raise UserError(f"{flag_name(f.name)} {value}: choose one of {', '.join(choices)}")
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) and number != f.default for number in numbers):
            raise UserError(f"{flag_name(f.name)} must be a finite number, not {join(numbers)}")
        if any(isinstance(number, (int, float)) and number < least for number in numbers):
            bound = f"be at least {least}" if least else "not be negative"
            raise UserError(f"{flag_name(f.name)} must {bound}, not {join(numbers)}")


def flag_name(field_name: str) -> str:
    """Flag of an option's field: ``max_num_seqs`` → ``--max-num-seqs``."""
    return "--" + field_name.replace("_", "-")


def join(values: tuple) -> str:
    """Write a tuple as the value of a flag: ``(2, 1)`` → ``2,1``."""
    return ",".join(str(value) for value in values)


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert the value of option ``name`` to the type ``hint``: a number, a string, a class with a ``parse`` method,
    or None. A tuple may be given as ``2,1``, ``[2, 1]`` or ``2``.

    Raises:
        UserError: the value cannot be converted.
    """
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if isinstance(value, str):
            parts = [part.strip() for part in value.replace("，", ",").split(",")]  # full-width commas, too
        else:
            parts = list(value) if isinstance(value, (list, tuple)) else [value]
        if not parts and name != "layers":
            raise UserError(f"{flag_name(name)} is empty; give at least one value")
        return tuple(convert(name, part, item) for part in parts)
    for kind in typing.get_args(hint):
        if hasattr(kind, "parse"):
            return kind.parse(value)
    if hint is str:
        value = str(value).removeprefix("torch.")  # Python callers may pass torch.bfloat16
        if not value and name not in ("tokenizer", "response_template", "chat_template"):
            raise UserError(f"{flag_name(name)} is empty; give a value, or leave the option out")
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise UserError(f"{flag_name(name)} must be True or False, not {value!r}")
        return value
    try:
        if isinstance(value, bool):
            raise ValueError
        number = hint(value)
        if isinstance(value, float) and number != value:
            raise ValueError
        return number
    except (TypeError, ValueError):
        kind = "a whole number" if hint is int else "a number"
        raise UserError(f"{flag_name(name)} must be {kind}, not {value!r}") from None
