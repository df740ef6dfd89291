"""The thread pool under stress, built with and without the thread sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "labinfer" / "functions" / "cpu"
STRESS = Path(__file__).with_name("thread_pool_stress.cpp")


@pytest.mark.parametrize("flags", [["-O2"], ["-O1", "-fsanitize=thread"]], ids=["plain", "sanitizer"])
def test_pieces_are_done_once_and_in_time(flags, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    program = tmp_path / "stress"
    files = [str(STRESS), str(SOURCES / "thread_pool.cpp")]
    subprocess.run(
        ["g++", "-std=c++17", "-pthread", *flags, f"-I{SOURCES}", *files, "-o", str(program)], check=True, timeout=120
    )
    # The sanitizer's shadow memory may not stand where addresses are random in more bits than it knows.
    run = ["setarch", "-R", str(program)] if shutil.which("setarch") else [str(program)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr[:3000]
