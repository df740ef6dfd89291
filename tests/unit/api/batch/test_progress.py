"""What is said of a job that runs."""

from __future__ import annotations

import io
import json
import os

import pytest
from fake_clock import FakeClock

from labinfer.api.batch.job import BatchJob
from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.llm_engine import EngineLoad, RunningAnswer
from labinfer.launch.fingerprint import Fingerprint
from labinfer.observe.output_file import OutputFile

RUNNING = tuple(RunningAnswer(number, 100, 200) for number in range(3))
LOAD = EngineLoad(num_running=3, num_waiting=2, kv_usage=0.256, num_running_requests=3, running_answers=RUNNING)
NOTHING = {"num_failed": 0, "output_tokens": 0, "allowed_tokens": 0, "generated_tokens": 0}


def show(form: str, num_lines: int | None, num_done: int = 4) -> str:
    clock, stream = FakeClock(), io.StringIO()
    progress = JobProgress(form, clock, num_lines, 10, stream)
    assert not progress.due()
    clock.now += 20
    progress.show(
        num_done=num_done, num_failed=1, output_tokens=500, allowed_tokens=500, generated_tokens=800, load=LOAD
    )
    progress.close()
    return stream.getvalue()


def test_line_says_how_long_the_rest_will_take():
    """300 tokens of the running lines, and 17 lines of 1100 / 6 tokens, at 40 tokens/s."""
    assert show("auto", 34) == (
        "labinfer: 14/34 lines done, 0:01:25 left, 40.0 tokens/s, 3 running, 2 waiting, KV 26 %\n"
    )
    assert "left" not in show("auto", 34, num_done=0)
    assert show("auto", None).startswith("labinfer: 14 done, 40.0 tokens/s, ")


def test_machines_get_json_lines():
    assert json.loads(show("jsonl", 34)) == {
        "lines_done": 14, "lines_failed": 1, "lines": 34, "running": 3, "waiting": 2, "kv_cache_usage": 0.256,
        "output_tokens": 500, "tokens_per_second": 40.0, "seconds": 20.0, "seconds_left": 85.4,
    }  # fmt: skip
    record = json.loads(show("jsonl", None))
    assert record["lines"] is record["seconds_left"] is None


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_line_of_a_large_job_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((columns, 24)))
    clock, stream = FakeClock(), io.StringIO()
    stream.isatty = lambda: True
    stream.fileno = lambda: 2
    progress = JobProgress("auto", clock, 250_000, 0, stream)
    clock.now += 3600
    progress.show(
        num_done=120_000, num_failed=0, output_tokens=10**7, allowed_tokens=10**7, generated_tokens=10**7, load=LOAD
    )
    line = stream.getvalue()
    assert line.startswith("\r120000/250000 lines done, 1:05:00 left") and len(line.strip("\r")) < columns


def test_json_lines_come_each_second_and_none_is_silent():
    clock = FakeClock()
    progress = JobProgress("jsonl", clock, 5, 0, io.StringIO())
    due = []
    for _ in range(4):
        clock.now += 0.5
        if progress.due():
            due.append(clock.now)
            progress.show(num_done=0, **NOTHING, load=LOAD)
    assert due == [1001.0, 1002.0]
    silent = JobProgress("none", clock, 5, 0, io.StringIO())
    clock.now += 100
    assert not silent.due()


def test_line_on_the_terminal_makes_room_for_answers(monkeypatch):
    written = []
    monkeypatch.setattr(OutputFile, "is_terminal", True)
    monkeypatch.setattr(OutputFile, "write", lambda self, text: written.append(stream.getvalue()[-5:]))
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = JobProgress("auto", FakeClock(), None, 0, stream)
    progress.show(num_done=0, **NOTHING, load=LOAD)
    output = JobOutput(JobOptions(input="in.jsonl"), {}, {})
    fingerprint = Fingerprint({}, reproducible=False)
    job = BatchJob(None, output, progress, defaults=SamplingParams(), model_name="m", fingerprint=fingerprint)
    job._refuse(1, b"", (None, None), "no")
    assert written == ["    \r"], "the line is gone when an answer comes"
