"""Room for the shared memory of MPICH."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from labinfer.base.errors import UserError
from labinfer.comm.spmd.processes import mpi_launcher_began

mpi = pytest.importorskip("labinfer.comm.mpi")


def test_only_segments_of_this_launch_count_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=0, f_frsize=4096))
    (segment := tmp_path / "mpich_shm_abc").write_bytes(b"x" * 2 * mpi.SEGMENT_BYTES)
    made = segment.stat().st_mtime
    mpi.check_shared_memory(1, made - 1, str(tmp_path))
    with pytest.raises(UserError, match="has 0.0 MiB left"):
        mpi.check_shared_memory(1, made + 1, str(tmp_path))  # another launch has made it before
    monkeypatch.setattr(os, "geteuid", lambda: segment.stat().st_uid + 1)
    with pytest.raises(UserError, match="has 0.0 MiB left"):
        mpi.check_shared_memory(1, made - 1, str(tmp_path))  # another user has made it


def test_time_at_which_the_launcher_began_is_that_of_its_process(tmp_path):
    (launcher := tmp_path / "hydra_pmi_proxy").write_text(
        f'#!/bin/sh\nsleep 0.3\n{sys.executable} -c "from labinfer.comm.spmd.processes import *; print(mpi_launcher_began())"\n'
    )
    launcher.chmod(0o700)
    before = time.time()
    began = float(subprocess.run([launcher], capture_output=True, text=True, check=True).stdout)
    assert before - 0.05 <= began < before + 0.25
    assert mpi_launcher_began() < before
