"""Libraries compiled at the first run: once for a source, and a reason where they cannot be."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labinfer.native import compiler

pytestmark = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path) -> Path:
    """One function over a number from a header."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int ANSWER = 42;\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return folder


def path_of(library: ctypes.CDLL) -> Path:
    return Path(library._name)


def test_library_is_built_once_and_another_source_makes_another(tmp_path, sources):
    cache = tmp_path / "cache"
    library = compiler.load("answer", sources, cache)
    changed = path_of(library).stat().st_mtime_ns
    assert compiler.load("answer", sources, cache) is library and path_of(library).stat().st_mtime_ns == changed
    (sources / "answer.h").write_text("constexpr int ANSWER = 43;\n")
    other = compiler.load("answer", sources, cache)
    assert [library.answer(), other.answer()] == [42, 43]
    assert path_of(compiler.load("answer", sources, cache, ["-O1"])) not in (path_of(library), path_of(other))
    assert [found.suffix for found in cache.iterdir()] == [".so"] * 3  # nothing unfinished is left


def test_library_that_is_not_ready_is_not_compiled(tmp_path, sources):
    cache = tmp_path / "cache"
    with pytest.raises(compiler.NoCompiler, match="answer-.* is not compiled yet"):
        compiler.load("answer", sources, cache, only_ready=True)
    assert not [*cache.iterdir()]
    library = compiler.load("answer", sources, cache)
    assert compiler.load("answer", sources, cache, only_ready=True) is library


def test_what_killed_compilations_left_is_removed_when_it_is_old(tmp_path, sources):
    old, young = (tmp_path / f"{compiler.COMPILING}{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "answer.o").touch()
        (tmp_path / f"{folder.name}.lock").touch()
    os.utime(old, (0, 0))
    os.utime(tmp_path / f"{old.name}.lock", (0, 0))
    compiler.load("answer", sources, tmp_path)
    assert young.exists() and not old.exists()
    assert [path.name for path in tmp_path.glob("*.lock")] == [f"{young.name}.lock"]


def test_progress_is_told_from_none_to_all_files_and_only_while_something_is_compiled(tmp_path, sources):
    (sources / "question.cpp").write_text('extern "C" int question() { return 6 * 7; }\n')
    told: list[tuple[int, int]] = []
    library = compiler.load("answer", sources, tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, 2) and told[-1] == (2, 2) and told == sorted(told)
    count = len(told)
    assert library.answer() == library.question() == 42
    compiler.load("answer", sources, tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert len(told) == count


def test_why_it_cannot_be_built_is_said(tmp_path, sources, monkeypatch):
    (sources / "broken.cpp").write_text("int main( {")
    with pytest.raises(compiler.NoCompiler, match="failed: .*error"):
        compiler.load("answer", sources, tmp_path / "cache")
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(compiler.NoCompiler, match=r"no C\+\+ compiler found \(no-such-compiler\)"):
        compiler.load("answer", sources, tmp_path / "cache")


def test_place_that_cannot_be_made_is_named(tmp_path, sources):
    (tmp_path / "file").touch()
    with pytest.raises(
        compiler.NoCompiler, match="file/cache, the directory for compiled libraries, cannot be created"
    ):
        compiler.load("answer", sources, tmp_path / "file" / "cache")


def test_user_without_a_home_has_no_place_for_one(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(compiler.NoCompiler, match="no directory for compiled libraries.* home directory"):
        compiler.default_cache()


def test_folder_in_which_others_may_write_is_closed_and_what_they_may_have_written_is_compiled_anew(
    tmp_path, sources, caplog
):
    cache, mask = tmp_path / "cache", os.umask(0o002)  # under which everything is writable by the group
    try:
        path = path_of(compiler.load("answer", sources, cache))
    finally:
        os.umask(mask)
    for bit in (0o020, 0o002):
        content = path.read_bytes()
        path.chmod(0o700 | bit)
        cache.chmod(0o755 | bit)
        caplog.clear()
        assert compiler.load("answer", sources, cache).answer() == 42
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o700
        assert cache.stat().st_mode & 0o022 == 0
        assert [record.getMessage() for record in caplog.records] == [
            f"{path} is ignored (others may write to it); compiling again"
        ]


def test_folder_of_another_user_is_refused(tmp_path, sources, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, 12345, 12345)
    with pytest.raises(compiler.NoCompiler, match=f"{tmp_path} belongs to user"):
        compiler.load("answer", sources, tmp_path)


def test_any_damage_is_noticed_and_the_library_compiled_anew(tmp_path, sources, caplog):
    path = path_of(compiler.load("answer", sources, tmp_path))
    content, generator = path.read_bytes(), random.Random(1)
    flips = [generator.randrange(8 * len(content)) for _ in range(10)]
    sizes = [len(content) * part // 5 for part in range(5)] + [len(content) - 1]
    for place in flips:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        check_compiled_anew(sources, path, lambda damaged=damaged: path.write_bytes(damaged), caplog)
    for size in sizes:
        check_compiled_anew(sources, path, lambda size=size: os.truncate(path, size), caplog)


@pytest.mark.parametrize("kind", ["FIFO", "symbolic link", "socket", "another library", "another user's"])
def test_what_is_no_library_of_this_name_and_user_is_compiled_anew(tmp_path, sources, caplog, monkeypatch, kind):
    path = path_of(compiler.load("answer", sources, tmp_path))
    other = path_of(compiler.load("answer", sources, tmp_path, ["-O1"]))

    def replace() -> None:
        if kind == "another user's":
            if os.geteuid():
                pytest.skip("only root gives files to others")
            os.chown(path, 12345, 12345)
            return
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "symbolic link":
            path.symlink_to(other)
        elif kind == "socket":
            monkeypatch.chdir(tmp_path)  # whose path may be longer than a socket's
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        else:
            shutil.copy(other, path)

    check_compiled_anew(sources, path, replace, caplog)


def check_compiled_anew(sources: Path, path: Path, damage: Callable[[], object], caplog) -> None:
    damage()
    caplog.clear()
    assert compiler.load("answer", sources, path.parent).answer() == 42
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "compiling again" in record.getMessage()
    caplog.clear()
    compiler.load("answer", sources, path.parent)
    assert not caplog.records and path.is_file() and not path.is_symlink()


def test_library_is_used_where_it_cannot_be_kept(tmp_path, sources, caplog):
    path = path_of(compiler.load("answer", sources, tmp_path))
    path.unlink()
    (path / "of a user").mkdir(parents=True)
    assert compiler.load("answer", sources, tmp_path).answer() == 42
    assert "it is a directory" in caplog.messages[0] and "could not be cached" in caplog.messages[1]


def test_file_that_changes_after_it_was_loaded_changes_nothing(tmp_path, sources):
    library = compiler.load("answer", sources, tmp_path)
    path_of(library).write_bytes(b"")  # whose pages would be gone were it mapped
    assert library.answer() == 42


def test_library_is_loaded_from_its_file_where_memory_may_not_be_executed(tmp_path, sources, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    compiler.load("answer", sources, tmp_path)
    compiler._open.cache_clear()
    monkeypatch.setattr(os, "memfd_create", refuse)
    first = compiler.load("answer", sources, tmp_path)
    second = compiler.load("answer", sources, tmp_path, ["-O1"])
    assert first.answer() == second.answer() == 42 and first._handle != second._handle


def test_library_that_cannot_be_loaded_leaves_nothing_open(tmp_path):
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="file too short|invalid ELF header"):
        compiler._open(tmp_path / "broken.so", b"no library")
    assert len(os.listdir("/proc/self/fd")) == num_open


COUNTING = """#!/bin/sh
echo x >> {count}
sleep 1
exec {compiler} "$@"
"""
LOAD = """
import logging, sys
from pathlib import Path
from labinfer.native import compiler
logging.basicConfig(format="%(message)s")
compiler.COMPILERS = (sys.argv[1],)
print(compiler.load("answer", Path(sys.argv[2]), Path(sys.argv[3])).answer())
"""


def test_of_starts_at_once_one_compiles_and_the_others_wait_with_a_line(tmp_path, sources):
    count, cache = tmp_path / "count", tmp_path / "cache"
    slow = tmp_path / "slow-compiler"
    slow.write_text(COUNTING.format(count=count, compiler=compiler.find_compiler()))
    slow.chmod(0o700)
    command = [sys.executable, "-c", LOAD, str(slow), str(sources), str(cache)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ends = [start.communicate(timeout=120) for start in starts]
    assert [printed for printed, _ in ends] == ["42\n"] * 4
    assert count.read_text() == "x\n" * 2  # to compile, and to link
    said = [line for _, lines in ends for line in lines.splitlines()]
    assert len(said) <= 3 and all("another process is compiling" in line for line in said)
    assert len({line.split()[3] for line in said}) <= 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_lock_whose_holder_dies_goes_to_the_next(tmp_path, sources):
    path = path_of(compiler.load("answer", sources, tmp_path))
    path.unlink()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(path.with_suffix(".lock"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    told = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: told.set()
    compiler.logger.addHandler(handler)
    with ThreadPoolExecutor(1) as threads:
        loaded = threads.submit(compiler.load, "answer", sources, tmp_path)
        assert told.wait(60) and not loaded.done() and not path.exists()
        holder.kill()
        assert loaded.result(60).answer() == 42 and path.exists()
    compiler.logger.removeHandler(handler)
    holder.communicate()


def test_without_locks_and_after_the_limit_a_process_compiles_by_itself(tmp_path, sources, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    path = path_of(compiler.load("answer", sources, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        path.unlink()
        assert compiler.load("answer", sources, tmp_path).answer() == 42
    path.unlink()
    monkeypatch.setattr(compiler, "WAIT_LIMIT", 0)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert compiler.load("answer", sources, tmp_path).answer() == 42 and path.exists()
