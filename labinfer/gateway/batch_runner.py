"""BatchRunner: batches of ``/v1/batches``, each line answered as a request of its own, journaled like a job's lines.

A line goes the way of an online request: the same handlers, limits and errors, with a lower priority and so many at once at
most. Answers go to a file with a journal (``labinfer/batch``), so that a server that was killed goes on with the lines that
have none; the file becomes the output and the error file at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from labinfer.batch.job_output import JobOutput
from labinfer.batch.journal import line_digest
from labinfer.batch.reader import JsonlReader, LongLine
from labinfer.config import JobOptions
from labinfer.errors import is_failure
from labinfer.gateway.access import Caller
from labinfer.gateway.call import JSON, Call
from labinfer.gateway.event_stream import EventStream
from labinfer.gateway.file_store import FileStore
from labinfer.gateway.limits import LimitReached, ServerFull
from labinfer.gateway.options import MIB
from labinfer.gateway.service import Service
from labinfer.jsonl import BatchLine
from labinfer.openai import api_errors
from labinfer.openai.api_errors import ApiError
from labinfer.openai.files import Batch, BatchError, BatchErrors, RequestCounts

logger = logging.getLogger(__name__)

Handler = Callable[[Call], Awaitable[Response | EventStream]]
MAX_LINES = 50_000
"""Lines of a batch, as in OpenAI's API."""
MAX_OPEN_BATCHES, MAX_BATCHES = 64, 1000
"""Batches of one caller that are not done, and those that are remembered; the files of others stay."""
MAX_ERRORS = 20
"""Errors that are told of a batch that cannot begin."""
ENVELOPE_BYTES = 1 << 16
"""Bytes of a line around its body."""
PRIORITY = 1_000_000
"""Added to the priority of every line; the lowest goes first."""
RETRY_STATUSES = (429, 503)
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0
"""Time before a line that found no room is tried again."""
MAX_FAILURES = 3
"""Failures of the engine after which a line's answer is that error."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class LineFailure(msgspec.Struct, frozen=True):
    """A line that cannot be part of a batch."""

    number: int
    code: str
    message: str
    param: str | None = None


class BatchRunner:
    """Runs batches.

    Args:
        handlers: whoever answers a request of a route.
    """

    def __init__(self, service: Service, store: FileStore, handlers: dict[str, Handler]):
        self._service, self._store, self._handlers = service, store, handlers
        self._places = asyncio.Semaphore(service.options.max_batch_requests)
        self._tasks: dict[str, asyncio.Task] = {}

    def resume(self) -> None:
        """Go on with what an earlier server left."""
        for stored in self._store.all_batches():
            if stored.batch.status in OPEN:
                self._start(stored.owner, stored.batch)

    def create(self, caller: Caller, batch: Batch) -> None:
        """Take in a batch of a caller's file.

        Raises:
            ApiError: there is no such file, or too many batches are open.
        """
        file = self._store.file(caller.owner, batch.input_file_id)
        if file.purpose != "batch":
            raise api_errors.bad_request(f"input_file_id: the purpose of {file.id} is {file.purpose!r}, not 'batch'")
        before = self._store.batches(caller.owner)
        num_open = sum(other.status in OPEN for other in before)
        if num_open >= MAX_OPEN_BATCHES:
            raise api_errors.rate_limited(f"{num_open} batches of this caller are open already", MAX_WAIT_SECONDS)
        if len(before) >= MAX_BATCHES:
            self._store.forget_batch(next(other for other in before if other.status not in OPEN))
        self._store.put_batch(caller.owner, batch)
        self._start(caller.owner, batch)

    def cancel(self, owner: str, id: str) -> Batch:
        """Begin no more lines of a batch; those that are being answered come to their end.

        Raises:
            ApiError: there is none of this id, or it is over.
        """
        batch = self._store.batch(owner, id)
        if batch.status not in OPEN:
            raise api_errors.bad_request(f"the batch {id} is {batch.status}, and cannot be cancelled")
        if batch.status in ("validating", "in_progress"):
            batch = self._change(owner, batch, status="cancelling", cancelling_at=self._now())
        return batch

    def reads(self, owner: str, file_id: str) -> bool:
        """Whether an open batch is made of this file."""
        return any(b.input_file_id == file_id and b.status in OPEN for b in self._store.batches(owner))

    def _start(self, owner: str, batch: Batch) -> None:
        task = asyncio.create_task(self._run(owner, batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, owner: str, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                path = self._store.content(self._store.file(owner, batch.input_file_id))
                total, failures = await asyncio.to_thread(self._validate, path, batch.endpoint)
                batch = self._store.batch(owner, batch.id)
                if failures:
                    self._fail(owner, batch, failures)
                    return
                begun = {"request_counts": RequestCounts(total), "in_progress_at": self._now()}
                if batch.status == "validating":
                    begun["status"] = "in_progress"
                batch = self._change(owner, batch, **begun)
            if batch.status != "finalizing":
                await self._answer(owner, batch)
            await self._finish(owner, batch.id)
        except BaseException as error:  # whatever it is, the other batches go on
            if not is_failure(error):
                raise
            logger.error("batch %s failed\n%s", batch.id, traceback.format_exc().rstrip())
            self._fail(owner, self._store.batch(owner, batch.id), [LineFailure(0, "server_error", str(error)[:200])])

    # Lines.

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes | LongLine]]:
        longest = self._service.options.max_body_size * MIB + ENVELOPE_BYTES
        with contextlib.closing(JsonlReader(str(path), longest)) as lines:
            yield from lines

    def _validate(self, path: Path, endpoint: str) -> tuple[int, list[LineFailure]]:
        """The number of lines, and why some of them cannot be part of a batch; not on the event loop."""
        failures, ids, total = [], {}, 0
        for number, line in self._lines(path):
            total += 1
            failure = _check_line(number, line, endpoint, ids)
            if total > MAX_LINES:
                failure = LineFailure(number, "too_many_tasks", f"a batch may have {MAX_LINES} lines at most")
            if failure is not None:
                failures.append(failure)
            if len(failures) == MAX_ERRORS or total > MAX_LINES:
                break
        if not total:
            failures.append(LineFailure(0, "empty_file", "the file has no lines"))
        return total, failures

    async def _answer(self, owner: str, batch: Batch) -> None:
        """Answer the lines that have no answer yet, until all are answered or the batch is cancelled."""
        input = self._store.content(self._store.file(owner, batch.input_file_id))
        with contextlib.closing(self._output(batch, input)) as output:
            output.begin({})
            counts = RequestCounts(
                batch.request_counts.total, len(output.digests) - output.num_failed, output.num_failed
            )
            self._count(owner, batch.id, counts)
            tasks: set[asyncio.Task] = set()
            errors: list[BaseException] = []

            def end(task: asyncio.Task) -> None:
                self._places.release()
                tasks.discard(task)
                if not task.cancelled() and (error := task.exception()) is not None:
                    errors.append(error)

            try:
                for number, line in self._lines(input):
                    if number in output.digests:
                        continue
                    await self._places.acquire()
                    if errors or self._store.batch(owner, batch.id).status == "cancelling":
                        self._places.release()
                        break
                    task = asyncio.create_task(self._answer_line(owner, batch, number, line, output=output))
                    tasks.add(task)
                    task.add_done_callback(end)
                if tasks:
                    await asyncio.wait(tasks)
            finally:
                for task in list(tasks):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if errors:
                raise errors[0]

    def _output(self, batch: Batch, input: Path) -> JobOutput:
        return JobOutput(JobOptions(input=str(input), output=str(self._store.answers(batch)), resume=True), {}, {})

    async def _answer_line(self, owner: str, batch: Batch, number: int, line: bytes, *, output: JobOutput) -> None:
        parsed = msgspec.json.decode(line, type=BatchLine)
        id = f"{batch.id}-{number}"
        status, body = await self._ask(owner, batch.endpoint, id, bytes(parsed.body))
        response = {"status_code": status, "request_id": id, "body": msgspec.json.decode(body)}
        record = {"id": f"batch_req_{number}", "custom_id": parsed.custom_id, "response": response, "error": None}
        failed = status >= 400
        output.write(record, number, line_digest(line), failed)
        counts = self._store.batch(owner, batch.id).request_counts
        self._count(
            owner,
            batch.id,
            RequestCounts(counts.total, counts.completed + (not failed), counts.failed + failed),
        )

    async def _ask(self, owner: str, route: str, id: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a request, which waits for room as long as it takes."""
        num_failures = 0
        while True:
            caller = self._service.keys.caller(owner)
            call = Call(self._service, _request(route, id, body), route)
            call.caller, call.priority, status = caller, PRIORITY, 500
            seconds = MIN_WAIT_SECONDS
            try:
                response = await self._handlers[route](call)
                status = response.status_code
                return status, response.body
            except (LimitReached, ServerFull) as error:
                status, seconds = 429, error.retry_after_seconds
            except ApiError as error:
                status = error.status
                num_failures += error.code == "engine_failed"
                is_over = error.status not in RETRY_STATUSES and error.code != "engine_failed"
                if is_over or num_failures == MAX_FAILURES:
                    return status, msgspec.json.encode(error.body())
                seconds = float(error.headers.get("Retry-After", seconds))
            except BaseException as error:
                if not is_failure(error):
                    raise
                logger.error("request %s failed\n%s", call.id, traceback.format_exc().rstrip())
                return 500, msgspec.json.encode(api_errors.internal(call.id).body())
            finally:
                call.end(status, log=False)
            await asyncio.sleep(min(max(seconds, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS))

    # States.

    async def _finish(self, owner: str, id: str) -> None:
        """Make files of the answers."""
        batch = self._store.batch(owner, id)
        if batch.status == "in_progress":
            batch = self._change(owner, batch, status="finalizing", finalizing_at=self._now())
        parts = {name: self._store.new_upload_path() for name in ("output", "error")}
        await asyncio.to_thread(_split, self._store.answers(batch), parts["output"], parts["error"])
        done = {}
        for name, path in parts.items():
            if path.stat().st_size:
                file = self._store.adopt(owner, path, f"{batch.id}_{name}.jsonl", "batch_output")
                done[f"{name}_file_id"] = file.id
        ending = "cancelled" if batch.cancelling_at is not None else "completed"
        self._change(owner, batch, status=ending, **done, **{f"{ending}_at": self._now()})
        answers = self._store.answers(batch)
        for path in (answers, Path(f"{answers}.journal")):
            path.unlink(missing_ok=True)

    def _fail(self, owner: str, batch: Batch, failures: list[LineFailure]) -> None:
        errors = [
            BatchError(code=failure.code, message=failure.message, param=failure.param, line=failure.number or None)
            for failure in failures
        ]
        self._change(owner, batch, status="failed", failed_at=self._now(), errors=BatchErrors(errors))

    def _count(self, owner: str, id: str, counts: RequestCounts) -> None:
        """Tell how far a batch is; the journal knows that after a restart, too."""
        batch = self._store.batch(owner, id)
        self._store.put_batch(owner, msgspec.structs.replace(batch, request_counts=counts), is_lasting=False)

    def _change(self, owner: str, batch: Batch, **fields) -> Batch:
        batch = msgspec.structs.replace(batch, **fields)
        self._store.put_batch(owner, batch)
        return batch

    def _now(self) -> int:
        return int(self._service.wall_clock())


def _split(answers: Path, output: Path, errors: Path) -> None:
    """Part the lines of a file by their status."""
    with open(answers, "rb") as lines, open(output, "wb") as good, open(errors, "wb") as bad:
        for line in lines:
            status = msgspec.json.decode(line, type=AnswerLine).response.status_code
            (bad if status >= 400 else good).write(line)


class AnswerStatus(msgspec.Struct):
    """Status of a line's answer."""

    status_code: int


class AnswerLine(msgspec.Struct):
    """Enough of an answer to know which file it belongs in."""

    response: AnswerStatus


class BodyProbe(msgspec.Struct):
    """Enough of a body to know whether it can be a line's."""

    stream: bool | None = None


def _check_line(number: int, line: bytes | LongLine, endpoint: str, ids: dict[str, int]) -> LineFailure | None:
    """Why a line cannot be part of a batch; ``ids`` are the lines by their ``custom_id`` so far."""
    if isinstance(line, LongLine):
        return LineFailure(number, "line_too_long", f"the line has {line.num_bytes} bytes, more than --max-body-size")
    try:
        parsed = msgspec.json.decode(line, type=BatchLine)
        streams = msgspec.json.decode(parsed.body, type=BodyProbe).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineFailure(number, "invalid_json_line", f"the line is no request: {str(error)[:200]}")
    if parsed.method != "POST":
        return LineFailure(number, "invalid_method", f"method {parsed.method!r:.40} is not POST", "method")
    if parsed.url != endpoint:
        return LineFailure(number, "mismatched_url", f"url {parsed.url!r:.60} is not the batch's endpoint", "url")
    if ids.setdefault(parsed.custom_id, number) != number:
        first = ids[parsed.custom_id]
        return LineFailure(number, "duplicate_custom_id", f"custom_id is that of line {first} already", "custom_id")
    if streams:
        return LineFailure(number, "invalid_request", "stream=True is not offered in a batch", "body.stream")
    return None


def _request(route: str, id: str, body: bytes) -> Request:
    """An HTTP request with this body, whose client never goes."""
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict:
        if pieces:
            return pieces.pop()
        return await asyncio.get_running_loop().create_future()

    headers = [(b"content-type", JSON.encode()), (b"x-request-id", id.encode())]
    scope = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": headers, "client": None}
    return Request(scope, receive)
