"""Lines of a batch: BatchFile validates them; split_answers divides answers among the output file and the error file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from labinfer.api.batch.reader import JsonlReader, LongLine
from labinfer.requests.jsonl import BatchLine
from labinfer.server.gateway.options import MIB

MAX_LINES = 50_000
"""Maximum number of lines of a batch, as in OpenAI's API."""
MAX_FAILURES = 20
"""Number of failures after which the validation of a batch stops."""
ENVELOPE_BYTES = 1 << 16
"""Maximum length of a line, in bytes, without the request body that it contains."""


class LineFailure(msgspec.Struct, frozen=True):
    """Reason why a line of a batch's input file is invalid; ``number`` is 0 if the failure concerns the whole file."""

    number: int
    code: str
    message: str
    param: str | None = None


class AnswerStatus(msgspec.Struct):
    """HTTP status of the answer to a line of a batch."""

    status_code: int


class AnswerLine(msgspec.Struct):
    """Status of a line with an answer, which says whether the line belongs in the output file or in the error file."""

    response: AnswerStatus


class BodyProbe(msgspec.Struct):
    """The field ``stream`` of a line's request body, which must not be true."""

    stream: bool | None = None


class BatchFile:
    """The input file of a batch.

    Args:
        endpoint: path of the API to which every line must address its request.
        max_body_size: maximum size of the request body in a line, in MiB.
    """

    def __init__(self, path: Path, endpoint: str, max_body_size: int):
        self._path, self._endpoint = path, endpoint
        self._longest = max_body_size * MIB + ENVELOPE_BYTES

    def lines(self) -> Iterator[tuple[int, bytes | LongLine]]:
        """Yield (line number, line) of each non-empty line."""
        with contextlib.closing(JsonlReader(str(self._path), self._longest)) as lines:
            yield from lines

    def validate(self) -> tuple[int, list[LineFailure]]:
        """Check all lines of the file, which takes long for a large file. Returns the number of lines and the failures."""
        failures: list[LineFailure] = []
        numbers: dict[str, int] = {}
        total = 0
        for number, line in self.lines():
            total += 1
            failure = self._check(number, line, numbers)
            if total > MAX_LINES:
                failure = LineFailure(number, "too_many_tasks", f"a batch may have at most {MAX_LINES} lines")
            if failure is not None:
                failures.append(failure)
            if len(failures) == MAX_FAILURES or total > MAX_LINES:
                break
        if not total:
            failures.append(LineFailure(0, "empty_file", "the file has no lines"))
        return total, failures

    def _check(self, number: int, line: bytes | LongLine, numbers: dict[str, int]) -> LineFailure | None:
        """Reason why a line is invalid, or None; ``numbers`` maps each ``custom_id`` of earlier lines to the line number."""
        if isinstance(line, LongLine):
            problem = f"the line has {line.num_bytes} bytes, more than --max-body-size"
            return LineFailure(number, "line_too_long", problem)
        try:
            parsed = msgspec.json.decode(line, type=BatchLine)
            streams = msgspec.json.decode(parsed.body, type=BodyProbe).stream
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return LineFailure(number, "invalid_json_line", f"the line is not a valid request: {str(error)[:200]}")
        if parsed.method != "POST":
            return LineFailure(number, "invalid_method", f"method {parsed.method!r:.40} is not POST", "method")
        if parsed.url != self._endpoint:
            return LineFailure(number, "mismatched_url", f"url {parsed.url!r:.60} is not the batch's endpoint", "url")
        if (first := numbers.setdefault(parsed.custom_id, number)) != number:
            problem = f"custom_id is a duplicate of line {first}"
            return LineFailure(number, "duplicate_custom_id", problem, "custom_id")
        if streams:
            return LineFailure(number, "invalid_request", "stream=True is not supported in a batch", "body.stream")
        return None


def split_answers(answers: Path, output: Path, errors: Path) -> None:
    """Copy each line of the file ``answers`` to the file ``output`` if its status is a success, otherwise to ``errors``. An
    incomplete last line (disk full) is dropped."""
    with open(answers, "rb") as lines, open(output, "wb") as good, open(errors, "wb") as bad:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            status = msgspec.json.decode(line, type=AnswerLine).response.status_code
            (bad if status >= 400 else good).write(line)
