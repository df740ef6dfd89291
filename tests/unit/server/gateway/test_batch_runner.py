"""Batches whose lines find no room, whose server fails, and whose results cannot be written; handlers are functions here."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from labinfer.api.batch.job_output import JobOutput
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.openai.files import Batch
from labinfer.server.gateway import batch_runner
from labinfer.server.gateway.access import ANONYMOUS
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.batch_runner import BatchRunner
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.service import Service

URL = "/v1/completions"
SECONDS = 10.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(batch_runner, "MIN_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(batch_runner, "MAX_WAIT_SECONDS", 0.01)


class Server:
    """A runner over a folder, with one route.

    Args:
        handler: answers a line's body.
    """

    def __init__(self, folder: Path, handler: Callable[[dict[str, Any], HttpContext], Any], **options: Any):
        async def answer(context: HttpContext) -> Response:
            answer = handler(json.loads(bytes(await context.body())), context)
            return context.json(await answer if asyncio.iscoroutine(answer) else answer)

        self.service = Service(ServerOptions(files_dir=str(folder), **options), ["demo"], AsyncLLMEngine())
        self.store = self.service.files
        self.runner = BatchRunner(self.service, self.store, {URL: answer})

    def start(self, num_lines: int) -> Batch:
        bodies = [{"custom_id": str(n), "method": "POST", "url": URL, "body": {"n": n}} for n in range(num_lines)]
        upload = self.store.begin(ANONYMOUS.owner)
        upload.write(b"".join(json.dumps(body).encode() + b"\n" for body in bodies))
        file = upload.finish("in.jsonl", "batch")
        batch = Batch(id="batch_1", endpoint=URL, input_file_id=file.id, created_at=1)
        self.runner.create(ANONYMOUS, batch)
        return batch

    @property
    def batch(self) -> Batch:
        return self.store.batch(ANONYMOUS.owner, "batch_1")

    async def wait(self, until: Callable[[Batch], bool] = lambda batch: not batch.is_open) -> Batch:
        deadline = time.monotonic() + SECONDS
        while not until(self.batch):
            assert time.monotonic() < deadline, self.batch
            await asyncio.sleep(0.005)
        return self.batch

    def answered(self, file_id: str | None) -> set[str]:
        """Ids of the lines of a file."""
        return {line["custom_id"] for line in self.lines(file_id)}

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Lines of a file in the order of the input."""
        if file_id is None:
            return []
        path = self.store.content(self.store.file(ANONYMOUS.owner, file_id))
        return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["custom_id"])

    async def close(self) -> None:
        """End as a server that is killed does."""
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_failed_batch_keeps_the_answers_that_it_had(tmp_path, monkeypatch):
    write, num_written = JobOutput.write, []

    def write_some(self, record, *args, **kwargs):
        if len(num_written) == 3:
            raise OSError(errno.ENOSPC, "no space left")
        num_written.append(record)
        write(self, record, *args, **kwargs)

    monkeypatch.setattr(JobOutput, "write", write_some)

    def answer(body, context):
        if body["n"] == 1:
            raise api_errors.bad_request("odd")
        return {}

    async def run():
        server = Server(tmp_path, answer, max_batch_requests=1)
        server.start(10)
        batch = await server.wait()
        assert (batch.status, batch.errors.data[0].code) == ("failed", "server_error")
        assert batch.failed_at and not batch.completed_at
        assert (server.answered(batch.output_file_id), server.answered(batch.error_file_id)) == ({"0", "2"}, {"1"})
        assert not list((tmp_path / "batches").glob("*.answers*")) and not list((tmp_path / "uploads").iterdir())

    asyncio.run(run())


def test_warning_of_an_answer_stands_beside_it(tmp_path):
    def answer(body, context):
        if body["n"]:
            context.warn("odd")
        return {}

    async def run():
        server = Server(tmp_path, answer)
        server.start(2)
        lines = server.lines((await server.wait()).output_file_id)
        assert [line["response"].get("warning") for line in lines] == [None, "odd"]

    asyncio.run(run())


def test_results_that_cannot_be_written_are_written_later(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "no space left")

    async def run():
        server = Server(tmp_path, lambda body, call: {})
        with monkeypatch.context() as full:
            full.setattr(batch_runner, "split_answers", fail)
            server.start(3)
            await server.wait(lambda batch: batch.status == "finalizing" and not server.runner._tasks)
        server.runner.cancel(ANONYMOUS.owner, "batch_1")
        batch = await server.wait()
        assert batch.status == "completed" and len(server.answered(batch.output_file_id)) == 3

    asyncio.run(run())


def test_results_of_a_server_that_died_are_not_there_twice(tmp_path):
    async def run():
        server = Server(tmp_path, lambda body, call: {})
        server.start(3)
        done = await server.wait()
        left = server.store.answers(done)
        left.write_bytes(server.store.content(server.store.file(ANONYMOUS.owner, done.output_file_id)).read_bytes())
        before = {"status": "finalizing", "output_file_id": None, "completed_at": None}
        again = server.runner._change(ANONYMOUS.owner, done, **before)
        server.runner._start(ANONYMOUS.owner, again)
        batch = await server.wait()
        files = server.store.files(ANONYMOUS.owner)
        assert [file.id for file in files if file.purpose == "batch_output"] == [batch.output_file_id]

    asyncio.run(run())


def test_lines_that_wait_for_room_hold_up_no_other_batch(tmp_path):
    """And end when theirs is cancelled."""

    def answer(body, context):
        if context.id.startswith("batch_1"):
            raise api_errors.rate_limited("used up", 60.0, "tokens")
        return {}

    async def run():
        server = Server(tmp_path, answer, max_batch_requests=1)
        first = server.start(3)
        await server.wait(lambda batch: batch.status == "in_progress")
        other = Batch(id="batch_2", endpoint=URL, input_file_id=first.input_file_id, created_at=2)
        server.runner.create(ANONYMOUS, other)
        await server.wait(lambda _: not server.store.batch(ANONYMOUS.owner, "batch_2").is_open)
        assert server.runner.cancel(ANONYMOUS.owner, "batch_1").status == "cancelling"
        assert (await server.wait()).status == "cancelled"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "is_tried_again"),
    [
        (api_errors.overloaded("full", 1.0), True),
        (api_errors.engine_failed("ended"), True),
        (api_errors.given_up("ended twice"), False),
        (api_errors.bad_request("odd"), False),
        (RuntimeError("a bug"), False),
    ],
    ids=lambda value: getattr(value, "code", None) or str(value),
)
def test_only_what_may_pass_is_tried_again(tmp_path, error, is_tried_again):
    calls = []

    def answer(body, context):
        calls.append(context)
        if len(calls) == 1:
            raise error
        return {}

    async def run():
        server = Server(tmp_path, answer)
        server.start(1)
        batch = await server.wait()
        counts = batch.request_counts
        assert (len(calls), counts.completed, counts.failed) == ((2, 1, 0) if is_tried_again else (1, 0, 1))
        assert calls[0].seconds == 0.0

    asyncio.run(run())


def test_server_goes_on_where_another_was_killed(tmp_path):
    calls = []

    async def stop_at_two(body, context):
        calls.append(body["n"])
        if len(calls) == 3:
            await asyncio.Event().wait()
        return {}

    async def run():
        server = Server(tmp_path, stop_at_two, max_batch_requests=1)
        server.start(5)
        await server.wait(lambda batch: len(calls) == 3)
        orphans = [tmp_path / "files" / f"file-{0:024}", tmp_path / "batches" / f"batch_{0:024}.answers.journal"]
        orphans.append(tmp_path / "uploads" / f"{0:016}")
        others = [
            tmp_path / "files" / "notes.txt",
            tmp_path / "uploads" / "photo.jpg",
            tmp_path / "batches" / "a.answers",
        ]
        for path in (*orphans, *others):
            path.write_text("x")
        await server.close()
        os.close(server.store._lock)
        server = Server(tmp_path, stop_at_two, max_batch_requests=1)
        server.runner.resume()
        batch = await server.wait()
        assert calls == [0, 1, 2, 2, 3, 4]
        assert server.answered(batch.output_file_id) == set("01234")
        assert not any(path.exists() for path in orphans) and all(path.exists() for path in others)

    asyncio.run(run())


def test_batch_waits_for_a_server_that_has_its_key(tmp_path, caplog):
    async def run():
        server = Server(tmp_path, lambda body, call: asyncio.Event().wait())
        server.start(1)
        await server.wait(lambda batch: batch.status == "in_progress")
        await server.close()
        os.close(server.store._lock)
        server = Server(tmp_path, lambda body, call: {}, api_key=("another-key",))
        server.runner.resume()
        await asyncio.sleep(0.05)
        assert server.batch.status == "in_progress" and "batch_1 waits: its API key" in caplog.text
        os.close(server.store._lock)
        server = Server(tmp_path, lambda body, call: {})
        server.runner.resume()
        assert (await server.wait()).status == "completed"

    asyncio.run(run())


def test_batches_need_room_for_their_results(tmp_path):
    async def run():
        server = Server(tmp_path, lambda body, call: {"text": "x" * (1 << 19)}, max_files_size=2)
        batch = server.start(3)
        await server.wait()
        with pytest.raises(ApiError, match="file storage is full"):
            server.runner.create(ANONYMOUS, batch)

    asyncio.run(run())
