"""RequestLog: one log line per finished HTTP request."""

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
"""Maximum length, in characters, of an id, path or name in the log."""
PLAIN = re.compile(r"[!#-<>-~]+")
"""Pattern of values that need no quotes in a log line: visible ASCII characters other than " and =."""


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """Fields of a request's log line; never a key, a prompt or an answer. None means that a field does not apply."""

    id: str
    caller: str
    """Name of the caller; see ``ApiCaller.name``."""
    route: str
    """Path pattern of the endpoint, or the path of the request if no endpoint serves it."""
    status: int
    total_seconds: float
    """Seconds from the arrival of the request's header to the end of the response."""
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were prefix-cache hits."""
    generated_tokens: int | None = None
    ttft_seconds: float | None = None
    """Time to first token, in seconds."""
    finish_reason: str | None = None


class RequestLog:
    """Writes one log line per finished request, and flushes it.

    Values that callers choose (id, path, model name) are quoted unless they are plain visible ASCII. A request is therefore always
    one line, and one ``key=value`` never looks like two. The log is ASCII.

    Args:
        stream: destination.
        as_json: write one JSON object per line, with all fields, instead of ``key=value`` pairs of the fields that are not None.
        clock: seconds since 1970.
    """

    def __init__(self, stream: TextIO | LineWriter, as_json: bool, clock: Callable[[], float] = time.time):
        self._stream, self._as_json, self._clock = stream, as_json, clock

    def write(self, request: FinishedRequest) -> None:
        """Log ``request``. Write errors are ignored."""
        now = datetime.fromtimestamp(self._clock(), timezone.utc).isoformat(timespec="milliseconds")
        fields = {"time": now} | {name: _tidy(value) for name, value in dataclasses.asdict(request).items()}
        line = json.dumps(fields) if self._as_json else _format(fields)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
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
