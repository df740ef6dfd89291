"""RequestLog: a line for every HTTP request that has ended."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TextIO

from labinfer.observe.line_writer import LineWriter

MAX_TEXT = 256
"""Characters of an id, a path or a name that are written."""
PLAIN = re.compile(r"[!#-<>-~]+")
"""Visible ASCII that cannot be mistaken for the line's own signs: no space, no " and no =."""


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """The facts that are logged of a request: never a key, nor what was asked or answered. None is for what it does not have."""

    id: str
    caller: str
    """``ApiCaller.name``."""
    route: str
    """The pattern of its path; the path itself where nothing is served at it."""
    status: int
    total_seconds: float
    """From the request's head to the end of its answer."""
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the KV cache."""
    generated_tokens: int | None = None
    ttft_seconds: float | None = None
    """Time to first token."""
    finish_reason: str | None = None


class RequestLog:
    """Writes such lines, each at once.

    What callers may choose (an id, a path, a model's name) is quoted where it holds anything but visible ASCII, so that a line
    is always one line, and one ``key=value`` never looks like two. All of it is ASCII.

    Args:
        stream: where to.
        as_json: one JSON object a line, with all fields, instead of ``key=value`` of those there are.
        clock: seconds since 1970.
    """

    def __init__(self, stream: TextIO | LineWriter, as_json: bool, clock: Callable[[], float] = time.time):
        self._stream, self._as_json, self._clock = stream, as_json, clock

    def write(self, request: FinishedRequest) -> None:
        """Log ``request``. A log that cannot be written is no reason to fail what it tells of."""
        now = datetime.fromtimestamp(self._clock(), timezone.utc).isoformat(timespec="milliseconds")
        fields = {"time": now} | {name: _tidy(value) for name, value in dataclasses.asdict(request).items()}
        line = json.dumps(fields) if self._as_json else _format(fields)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: it is closed
            pass


def _tidy(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return value[:MAX_TEXT] if isinstance(value, str) else value


def _format(fields: dict[str, Any]) -> str:
    given = {name: value for name, value in fields.items() if value is not None}
    return " ".join(f"{name}={_quote(value)}" for name, value in given.items())


def _quote(value: Any) -> str:
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)
