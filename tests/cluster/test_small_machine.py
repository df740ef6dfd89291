"""Starts on machines that lack room: in /dev/shm, or in the address space of a process."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest
from launchers import LAUNCH, command, finish, start

PROMPT = ("--prompt", "red", "--max-tokens", "2")


def shell(line: str, *words: str, unshared: bool = False) -> list[str]:
    """A shell that runs ``line``, then becomes the program of ``words``."""
    namespace = ["unshare", "--mount"] if unshared else []
    return [*namespace, "bash", "-c", f"{line} && exec {shlex.join(words)}"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare to mount")
@pytest.mark.parametrize("size", ["64k", pytest.param("2m", marks=pytest.mark.slow)])
def test_shared_memory_without_room_is_one_line(size, model):
    words = command("mpirun", 2, LAUNCH, "--model", model, *PROMPT, "-pp", "2")
    done = finish(start(shell(f"mount -t tmpfs -o size={size} tmpfs /dev/shm", *words, unshared=True)), 100)
    assert done.returncode == 2
    (line,) = done.our_errors
    assert "/dev/shm has" in line and "MPI needs 2.3 MiB there for 2 ranks" in line and "--shm-size" in line
    assert "Bus error" not in done.text


@pytest.mark.parametrize(
    "kib",
    [300_000, *[pytest.param(kib, marks=pytest.mark.slow) for kib in (60_000, 150_000, 650_000, 780_000)]],
)
def test_small_address_space_is_one_line_that_names_its_limit(kib, model):
    done = finish(start(shell(f"ulimit -v {kib}", *command("single", 1, LAUNCH, "--model", model, *PROMPT))), 100)
    assert done.returncode == 2
    (line,) = done.our_errors
    assert f"ulimit -v (RLIMIT_AS) allows {kib} KiB" in line and "ulimit -v unlimited" in line
    assert "Traceback" not in done.text


def test_memory_for_the_kv_cache_is_within_the_address_space(model):
    done = finish(start(shell("ulimit -v 2000000", *command("single", 1, LAUNCH, "--model", model, *PROMPT))), 100)
    assert done.returncode == 0, done.text
    assert "labinfer: warning: ulimit -v (RLIMIT_AS) allows 2000000 KiB" in done.stderr
