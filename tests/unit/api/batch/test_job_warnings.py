"""Warnings of a job about lines that it answers, but perhaps not as they were meant."""

from __future__ import annotations

import logging
import time

from labinfer.api.batch.job import MAX_WARNINGS, BatchJob
from labinfer.api.batch.progress import JobProgress
from labinfer.base.sampling_params import SamplingParams
from labinfer.launch.fingerprint import Fingerprint


def make_job(model_name: str = "m") -> BatchJob:
    progress = JobProgress("none", time.monotonic, None, 0)
    return BatchJob(
        None,
        None,
        progress,
        defaults=SamplingParams(),
        model_name=model_name,
        fingerprint=Fingerprint({}, reproducible=False),
    )


def test_job_says_once_what_is_true_of_many_lines(caplog):
    job = make_job()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 100):
            for text in ("a was left out", f"{number} was left out"):
                job._warn(number, text, text)
    assert len(caplog.messages) == MAX_WARNINGS
    assert caplog.messages[0] == "line 1: a was left out (shown once)"


def test_line_for_another_model_is_warned_about_once(caplog):
    job = make_job("models/demo")
    with caplog.at_level(logging.WARNING):
        for asked in (None, "demo", "models/demo", "lab/demo"):
            job._check_model(1, asked)
        assert not caplog.messages
        for number, asked in enumerate(("gpt-x", "other"), 2):
            job._check_model(number, asked)
    (said,) = caplog.messages
    assert said.startswith("line 2: model 'gpt-x' requested, using 'models/demo' (shown once)")


def test_id_that_comes_twice_is_noticed():
    job = make_job()
    assert [job._is_duplicate(name) for name in ("a", 1, "1", None, None, "a", 1)] == [False] * 5 + [True] * 2
