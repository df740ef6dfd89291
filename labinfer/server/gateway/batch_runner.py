"""BatchRunner: runs batches of ``/v1/batches``, one request per line, with a journal like that of an offline job.

A line is handled by the handler of online requests, with the limits and errors of online requests, but with a lower priority and a
bounded number at a time. Answers go to a file with a journal (``labinfer/api/batch``), so that a restarted server resumes with the
unanswered lines. At the end of the batch, the file is split into the output file and the error file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.journal import line_digest
from labinfer.api.batch.options import JobOptions
from labinfer.base.errors import UserError, is_failure
from labinfer.requests.jsonl import BatchLine
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ENGINE_FAILED, ApiError
from labinfer.requests.openai.files import Batch, BatchError, BatchErrors, RequestCounts
from labinfer.server.gateway.access import ApiCaller
from labinfer.server.gateway.batch_lines import BatchFile, LineFailure, split_answers
from labinfer.server.gateway.event_stream import EventStream
from labinfer.server.gateway.file_store import FileStore
from labinfer.server.gateway.http_context import JSON, WARNING_HEADER, HttpContext
from labinfer.server.gateway.service import Service

logger = logging.getLogger(__name__)

Handler = Callable[[HttpContext], Awaitable[Response | EventStream]]
MAX_OPEN_BATCHES, MAX_BATCHES = 64, 1000
"""Maximum number of open batches, and of stored batches, per caller. Of more stored batches the oldest is dropped; its files
stay."""
PRIORITY = 1_000_000
"""Number added to the priority value of every line of a batch. Requests with lower values run first, so batches run after online
requests."""
RETRY_STATUSES = (429, 503)
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0
"""Bounds of the delay in seconds before a rejected line is retried."""


class LineAnswer(NamedTuple):
    """Answer to the request in one line of a batch."""

    status: int
    body: bytes = b""
    retry_seconds: float = 0.0
    """Seconds until a retry if the line was rejected for lack of capacity; 0 if the line is answered."""
    warning: str = ""
    """Text of the response header ``x-warning``."""


class BatchRunner:
    """Runs batches.

    Args:
        handlers: handler of each path that batches may address.
    """

    def __init__(self, service: Service, store: FileStore, handlers: dict[str, Handler]):
        self._service, self._store, self._handlers = service, store, handlers
        self._max_running = service.options.max_batch_requests
        self._places = asyncio.Semaphore(self._max_running)  # slots of running requests; a line in back-off holds none
        self._tasks: dict[str, asyncio.Task] = {}

    def resume(self) -> None:
        """Resume batches that were open when the previous server ended, if their owner's API key is still valid."""
        for stored in self._store.all_batches():
            if not stored.batch.is_open:
                continue
            try:
                self._service.keys.caller(stored.owner)
            except UserError as error:
                logger.warning("batch %s waits: %s", stored.batch.id, error)
                continue
            self._start(stored.owner, stored.batch)

    def create(self, caller: ApiCaller, batch: Batch) -> None:
        """Create and start a batch over a file of the caller.

        Raises:
            ApiError: the file does not exist, there is no space for results, or too many batches are open.
        """
        file = self._store.file(caller.owner, batch.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise api_errors.bad_request(
                f"input_file_id: the purpose of {file.id} is {file.purpose!r}, not 'batch'", "input_file_id"
            )
        self._store.check_room(caller.owner)
        before = self._store.batches(caller.owner)
        num_open = sum(other.is_open for other in before)
        if num_open >= MAX_OPEN_BATCHES:
            raise api_errors.rate_limited(
                f"the limit of {num_open} open batches per caller is reached", MAX_WAIT_SECONDS
            )
        if len(before) >= MAX_BATCHES:
            self._store.forget_batch(next(other for other in before if not other.is_open))
        self._store.put_batch(caller.owner, batch)
        self._start(caller.owner, batch)

    def cancel(self, owner: str, id: str) -> Batch:
        """Cancel a batch: its running lines finish, all other lines are left without an answer.

        Raises:
            ApiError: the batch does not exist or has ended.
        """
        batch = self._store.batch(owner, id)
        if not batch.is_open:
            raise api_errors.bad_request(f"the batch {id} is {batch.status}, and cannot be cancelled")
        if batch.status in ("validating", "in_progress"):
            batch = self._change(owner, batch, status="cancelling", cancelling_at=self._now())
        if id not in self._tasks:  # the batch has ended, but its result files could not be written: try again
            self._start(owner, batch)
        return batch

    def reads(self, owner: str, file_id: str) -> bool:
        """Whether ``file_id`` is the input file of an open batch."""
        return any(b.input_file_id == file_id and b.is_open for b in self._store.batches(owner))

    def _start(self, owner: str, batch: Batch) -> None:
        task = asyncio.create_task(self._run(owner, batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, owner: str, batch: Batch) -> None:
        failures: list[LineFailure] = []
        try:
            failures = await self._answer(owner, batch)
        except BaseException as error:  # a failure must not affect other batches
            if not is_failure(error):
                raise
            logger.error("batch %s failed\n%s", batch.id, traceback.format_exc().rstrip())
            failures = [LineFailure(0, "server_error", str(error)[:200])]
        try:
            await self._finish(owner, batch.id, failures)
        except OSError as error:
            problem = f"the results of batch {batch.id} cannot be written: {error.strerror}"
            logger.error("%s; retried when the server restarts, or if the batch is cancelled", problem)

    # Answers to the lines of a batch.

    async def _answer(self, owner: str, batch: Batch) -> list[LineFailure]:
        """Validate the input file of a batch, and answer all of its lines. If the file is invalid, no line is answered,
        and the failures are returned."""
        input = self._store.content(self._store.file(owner, batch.input_file_id))
        file = BatchFile(input, batch.endpoint, self._service.options.max_body_size)
        if batch.status == "validating":
            total, failures = await asyncio.to_thread(file.validate)
            if failures:
                return failures
            batch = self._store.batch(owner, batch.id)
            begun = {"request_counts": RequestCounts(total), "in_progress_at": self._now()}
            if batch.status == "validating":
                begun["status"] = "in_progress"
            batch = self._change(owner, batch, **begun)
        if batch.status != "finalizing":
            job = JobOptions(input=str(input), output=str(self._store.answers(batch)), resume=True)
            with contextlib.closing(JobOutput(job, {}, {})) as output:
                output.begin({})
                await self._answer_rest(owner, batch, file, output)
        return []

    async def _answer_rest(self, owner: str, batch: Batch, file: BatchFile, output: JobOutput) -> None:
        """Answer the lines that have no answer yet, until every line has one or the batch is cancelled."""
        num_failed = output.num_failed
        self._count(
            owner, batch.id, RequestCounts(batch.request_counts.total, len(output.digests) - num_failed, num_failed)
        )
        tasks: set[asyncio.Task] = set()

        async def wait_until(most: int) -> None:
            """Wait until at most ``most`` lines are being answered."""
            while len(tasks) > most:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks.difference_update(done)
                for task in done:
                    task.result()

        try:
            for number, line in file.lines():
                if number in output.digests:
                    continue
                await wait_until(self._max_running - 1)
                if self._is_cancelled(owner, batch.id):
                    break
                tasks.add(asyncio.create_task(self._answer_line(owner, batch, number, line, output=output)))
            await wait_until(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_line(self, owner: str, batch: Batch, number: int, line: bytes, *, output: JobOutput) -> None:
        """Answer line ``number`` of a batch. A rejected line is retried after a delay, unless the batch is cancelled
        meanwhile."""
        parsed = msgspec.json.decode(line, type=BatchLine)
        id = f"{batch.id}-{number}"
        while True:
            async with self._places:
                answer = await self._ask(owner, batch.endpoint, id, bytes(parsed.body))
            if not answer.retry_seconds:
                break
            await asyncio.sleep(min(max(answer.retry_seconds, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS))
            if self._is_cancelled(owner, batch.id):
                return
        response = {"status_code": answer.status, "request_id": id, "body": msgspec.json.decode(answer.body)}
        if answer.warning:
            response["warning"] = answer.warning
        record = {"id": f"batch_req_{number}", "custom_id": parsed.custom_id, "response": response, "error": None}
        failed = answer.status >= 400
        output.write(record, number, line_digest(line), failed)
        counts = self._store.batch(owner, batch.id).request_counts
        self._count(
            owner,
            batch.id,
            RequestCounts(counts.total, counts.completed + (not failed), counts.failed + failed),
        )

    async def _ask(self, owner: str, route: str, id: str, body: bytes) -> LineAnswer:
        """Run one request through the handler of ``route``, and return its answer."""
        context = HttpContext(self._service, _request(route, id, body), route)
        context.caller, context.priority, context.seconds = self._service.keys.caller(owner), PRIORITY, 0.0
        status = 500
        try:
            response = await self._handlers[route](context)
            status = response.status_code
            return LineAnswer(status, response.body, warning=response.headers.get(WARNING_HEADER, ""))
        except ApiError as error:
            status = error.status
            if status in RETRY_STATUSES or (error.code == ENGINE_FAILED and not error.is_final):
                return LineAnswer(status, retry_seconds=error.retry_after_seconds or MIN_WAIT_SECONDS)
            return LineAnswer(status, msgspec.json.encode(error.body()))
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.error("request %s failed\n%s", context.id, traceback.format_exc().rstrip())
            return LineAnswer(status, msgspec.json.encode(api_errors.internal(context.id).body()))
        finally:
            context.end(status, log=False)

    # Changes of the state of a batch.

    async def _finish(self, owner: str, id: str, failures: list[LineFailure]) -> None:
        """End a batch: make its result files from the answers so far, also of a failed batch.

        Raises:
            OSError: the files cannot be written.
        """
        batch = self._store.batch(owner, id)
        if failures:
            errors = [
                BatchError(code=failure.code, message=failure.message, param=failure.param, line=failure.number or None)
                for failure in failures
            ]
            batch = self._change(owner, batch, errors=BatchErrors(errors))
        answers, results = self._store.answers(batch), {}
        if answers.exists():
            if batch.status == "in_progress":
                batch = self._change(owner, batch, status="finalizing", finalizing_at=self._now())
            results = await self._adopt_answers(owner, batch, answers)
        ending = "completed"
        if batch.errors is not None:
            ending = "failed"
        elif batch.cancelling_at is not None:
            ending = "cancelled"
        self._change(owner, batch, status=ending, **results, **{f"{ending}_at": self._now()})
        self._store.remove_answers(batch)

    async def _adopt_answers(self, owner: str, batch: Batch, answers: Path) -> dict[str, str]:
        """Store answers as result files (output and errors) of ``owner``. Returns the ids of the files that are not empty, by their
        name in ``Batch``."""
        paths = {name: self._store.new_upload_path() for name in ("output", "error")}
        results = {}
        try:
            await asyncio.to_thread(split_answers, answers, paths["output"], paths["error"])
            for name, path in paths.items():
                filename = f"{batch.id}_{name}.jsonl"
                self._store.remove_results(owner, filename)  # left by a server that died before it stored the batch
                if path.stat().st_size:
                    results[f"{name}_file_id"] = self._store.adopt(owner, path, filename, "batch_output").id
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)
        return results

    def _is_cancelled(self, owner: str, id: str) -> bool:
        return self._store.batch(owner, id).status == "cancelling"

    def _count(self, owner: str, id: str, counts: RequestCounts) -> None:
        """Update the progress counts of a batch in memory. After a restart, the counts come from the journal."""
        batch = self._store.batch(owner, id)
        self._store.put_batch(owner, msgspec.structs.replace(batch, request_counts=counts), is_lasting=False)

    def _change(self, owner: str, batch: Batch, **fields) -> Batch:
        batch = msgspec.structs.replace(batch, **fields)
        self._store.put_batch(owner, batch)
        return batch

    def _now(self) -> int:
        return int(self._service.wall_clock())


def _request(route: str, id: str, body: bytes) -> Request:
    """Make an HTTP request with ``body``, as if from a client that never disconnects."""
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict:
        if pieces:
            return pieces.pop()
        return await asyncio.get_running_loop().create_future()

    headers = [(b"content-type", JSON.encode()), (b"x-request-id", id.encode())]
    scope = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": headers, "client": None}
    return Request(scope, receive)
