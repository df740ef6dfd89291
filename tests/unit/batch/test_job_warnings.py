"""What a job says of lines that it answers, but perhaps not as they were meant."""

from __future__ import annotations

import json
import logging
import time

from labinfer.batch.job import MAX_WARNINGS, BatchJob
from labinfer.batch.progress import JobProgress
from labinfer.jsonl import parse_line
from labinfer.sampling_params import SamplingParams


def make_job(model_name: str = "m") -> BatchJob:
    progress = JobProgress("none", time.monotonic, None, 0)
    return BatchJob(None, None, progress, defaults=SamplingParams(), model_name=model_name)


def doubts(job: BatchJob, **fields) -> list[str]:
    return list(job._doubts(parse_line(json.dumps(fields).encode(), SamplingParams())))


def test_job_says_once_what_is_true_of_many_lines(caplog):
    job = make_job()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 100):
            job._warn(number, ("a was left out", f"{number} was left out"))
    assert len(caplog.messages) == MAX_WARNINGS
    assert caplog.messages[0] == "line 1: a was left out; other lines of which this is true are not named"


def test_line_for_another_model_is_doubtful():
    job = make_job("models/demo")

    def line(**body) -> dict:
        return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", **body}}

    assert doubts(job, **line(model="other")) == ["it asks for the model 'other', and 'models/demo' answers it"]
    for body in ({}, {"model": "demo"}, {"model": "models/demo"}):
        assert not doubts(job, **line(**body))


def test_id_that_comes_twice_is_doubtful():
    job = make_job()
    assert not any(doubts(job, id=name, prompt="x") for name in ("a", 1, "1"))
    assert not doubts(job, prompt="x") and not doubts(job, prompt="x")
    assert doubts(job, id="a", prompt="y") == ["it has the id of an earlier line, so that their answers look alike"]
