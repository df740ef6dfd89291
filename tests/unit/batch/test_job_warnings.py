"""What a job says of parts of lines that were left out."""

from __future__ import annotations

import logging
import time

from labinfer.batch.job import MAX_WARNINGS, BatchJob
from labinfer.batch.progress import JobProgress
from labinfer.sampling_params import SamplingParams


def test_job_says_once_what_is_true_of_many_lines(caplog):
    progress = JobProgress("none", time.monotonic, None, 0)
    job = BatchJob(None, None, progress, defaults=SamplingParams(), model_name="m")
    with caplog.at_level(logging.WARNING):
        for number in range(1, 100):
            job._warn(number, ("a was left out", f"{number} was left out"))
    assert len(caplog.messages) == MAX_WARNINGS
    assert caplog.messages[0] == "line 1: a was left out; other lines of which this is true are not named"
