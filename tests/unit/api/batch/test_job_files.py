"""Which files of a job are opened before ranks meet."""

from __future__ import annotations

import os

from labinfer.api.batch.job_files import QUICK_BYTES, open_quickly
from labinfer.api.batch.options import JobOptions


def test_files_that_others_would_wait_for_are_not_opened_quickly(tmp_path):
    small, long, pipe = tmp_path / "small", tmp_path / "long", tmp_path / "pipe"
    small.write_text("{}")
    long.touch()
    os.truncate(long, QUICK_BYTES + 1)
    os.mkfifo(pipe)
    assert open_quickly(JobOptions(input=str(small), output=str(tmp_path / "new")))
    assert open_quickly(JobOptions(input=str(tmp_path / "missing")))
    assert not open_quickly(JobOptions(input=str(long)))
    assert not open_quickly(JobOptions(input=str(pipe)))
    assert not open_quickly(JobOptions(input=str(small), output=str(long)))
