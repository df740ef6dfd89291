"""What is said of a job that runs."""

from __future__ import annotations

import io
import json

import pytest
from fake_clock import FakeClock

from labinfer.api.batch.job import BatchJob
from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.llm_engine import EngineLoad
from labinfer.observe.output_file import OutputFile

LOAD = EngineLoad(num_running=3, num_waiting=2, kv_usage=0.256)


def show(form: str, num_lines: int | None, num_done: int = 4) -> str:
    clock, stream = FakeClock(), io.StringIO()
    progress = JobProgress(form, clock, num_lines, 10, stream)
    assert not progress.due()
    clock.now += 20
    progress.show(num_done=num_done, num_failed=1, output_tokens=500, generated_tokens=800, load=LOAD)
    progress.close()
    return stream.getvalue()


def test_line_says_how_long_the_rest_will_take():
    assert show("auto", 34) == (
        "labinfer: 14 of 34 lines done, 3 running, 2 waiting, KV 26 %, 40.0 tokens/s, 0:01:03 left\n"
    )
    assert "left" not in show("auto", 34, num_done=0)
    assert show("auto", None).startswith("labinfer: 14 done, ")


def test_machines_get_json_lines():
    assert json.loads(show("jsonl", 34)) == {
        "lines_done": 14, "lines_failed": 1, "lines": 34, "running": 3, "waiting": 2, "kv_cache_usage": 0.256,
        "output_tokens": 500, "tokens_per_second": 40.0, "seconds": 20.0, "seconds_left": 62.8,
    }  # fmt: skip
    record = json.loads(show("jsonl", None))
    assert record["lines"] is record["seconds_left"] is None


@pytest.mark.parametrize(
    ("num_done", "num_failed", "output_tokens", "generated_tokens", "num_running", "seconds_left"),
    [
        (1, 0, 5, 12_755, 255, 998 / 256 * 20 - 20),  # the first to end are short
        (91, 90, 100, 910, 9, 998 / 99.1 * 20 - 20),  # those that failed have no tokens
        (64, 0, 6400, 9600, 64, 998 / 96 * 20 - 20),  # half of the next ones
        (5, 5, 0, 300, 4, 998 / 5 * 20 - 20),
    ],
)
def test_lines_that_run_are_parts_of_lines(
    num_done, num_failed, output_tokens, generated_tokens, num_running, seconds_left
):
    clock, stream = FakeClock(), io.StringIO()
    progress = JobProgress("jsonl", clock, 998, 0, stream)
    clock.now += 20
    progress.show(
        num_done=num_done,
        num_failed=num_failed,
        output_tokens=output_tokens,
        generated_tokens=generated_tokens,
        load=EngineLoad(num_running=num_running, num_waiting=2, kv_usage=0.256),
    )
    assert json.loads(stream.getvalue())["seconds_left"] == pytest.approx(seconds_left, abs=0.1)


def test_json_lines_come_each_second_and_none_is_silent():
    clock = FakeClock()
    progress = JobProgress("jsonl", clock, 5, 0, io.StringIO())
    due = []
    for _ in range(4):
        clock.now += 0.5
        if progress.due():
            due.append(clock.now)
            progress.show(num_done=0, num_failed=0, output_tokens=0, generated_tokens=0, load=LOAD)
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
    progress.show(num_done=0, num_failed=0, output_tokens=0, generated_tokens=0, load=LOAD)
    output = JobOutput(JobOptions(input="in.jsonl"), {}, {})
    BatchJob(None, output, progress, defaults=SamplingParams(), model_name="m")._refuse(1, b"", (None, None), "no")
    assert written == ["    \r"], "the line is gone when an answer comes"
