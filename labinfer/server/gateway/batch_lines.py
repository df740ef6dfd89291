"""Lines of a batch: which can be part of one, and into which file their answers go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from labinfer.api.batch.reader import JsonlReader, LongLine
from labinfer.requests.jsonl import BatchLine
from labinfer.server.gateway.options import MIB

MAX_LINES = 50_000
"""Lines of a batch, as in OpenAI's API."""
MAX_FAILURES = 20
"""Lines that are told of a batch that cannot begin."""
ENVELOPE_BYTES = 1 << 16
"""Bytes of a line around its body."""


class LineFailure(msgspec.Struct, frozen=True):
    """A line that cannot be part of a batch; number 0 where the failure is no line's."""

    number: int
    code: str
    message: str
    param: str | None = None


class AnswerStatus(msgspec.Struct):
    """Status of a line's answer."""

    status_code: int


class AnswerLine(msgspec.Struct):
    """Enough of an answer to know which file it belongs in."""

    response: AnswerStatus


class BodyProbe(msgspec.Struct):
    """Enough of a body to know whether it can be a line's."""

    stream: bool | None = None


class BatchFile:
    """The input of a batch.

    Args:
        endpoint: route that every line has to be for.
        max_body_size: MiB of a line's body at most.
    """

    def __init__(self, path: Path, endpoint: str, max_body_size: int):
        self._path, self._endpoint = path, endpoint
        self._longest = max_body_size * MIB + ENVELOPE_BYTES

    def lines(self) -> Iterator[tuple[int, bytes | LongLine]]:
        """Each line that is not empty, with its number."""
        with contextlib.closing(JsonlReader(str(self._path), self._longest)) as lines:
            yield from lines

    def validate(self) -> tuple[int, list[LineFailure]]:
        """The number of lines, and why some of them cannot be part of a batch; this takes a while."""
        failures: list[LineFailure] = []
        numbers: dict[str, int] = {}
        total = 0
        for number, line in self.lines():
            total += 1
            failure = self._check(number, line, numbers)
            if total > MAX_LINES:
                failure = LineFailure(number, "too_many_tasks", f"a batch may have {MAX_LINES} lines at most")
            if failure is not None:
                failures.append(failure)
            if len(failures) == MAX_FAILURES or total > MAX_LINES:
                break
        if not total:
            failures.append(LineFailure(0, "empty_file", "the file has no lines"))
        return total, failures

    def _check(self, number: int, line: bytes | LongLine, numbers: dict[str, int]) -> LineFailure | None:
        """Why a line cannot be part of a batch; ``numbers`` are those of the lines so far, by their ``custom_id``."""
        if isinstance(line, LongLine):
            problem = f"the line has {line.num_bytes} bytes, more than --max-body-size"
            return LineFailure(number, "line_too_long", problem)
        try:
            parsed = msgspec.json.decode(line, type=BatchLine)
            streams = msgspec.json.decode(parsed.body, type=BodyProbe).stream
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return LineFailure(number, "invalid_json_line", f"the line is no request: {str(error)[:200]}")
        if parsed.method != "POST":
            return LineFailure(number, "invalid_method", f"method {parsed.method!r:.40} is not POST", "method")
        if parsed.url != self._endpoint:
            return LineFailure(number, "mismatched_url", f"url {parsed.url!r:.60} is not the batch's endpoint", "url")
        if (first := numbers.setdefault(parsed.custom_id, number)) != number:
            problem = f"custom_id is that of line {first} already"
            return LineFailure(number, "duplicate_custom_id", problem, "custom_id")
        if streams:
            return LineFailure(number, "invalid_request", "stream=True is not offered in a batch", "body.stream")
        return None


def split_answers(answers: Path, output: Path, errors: Path) -> None:
    """Part the lines of a file by their status. The last one may be broken off, where the disk was full."""
    with open(answers, "rb") as lines, open(output, "wb") as good, open(errors, "wb") as bad:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            status = msgspec.json.decode(line, type=AnswerLine).response.status_code
            (bad if status >= 400 else good).write(line)
