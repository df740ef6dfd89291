"""Libraries of C functions from folders of C++ files, compiled once for each kind of machine and loaded through ctypes."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-Wno-psabi")
COMPILERS = ("g++", "c++", "clang++")
TIME_LIMIT = 120
"""Seconds of one compilation."""
LOOK_SECONDS = 0.2
"""Between two reports of how far it is."""

OnProgress = Callable[[int, int], None]
"""Called with the number of files that are compiled and of all: before the first, and now and then until the last."""


class NoCompiler(Exception):
    """There is no library; the text says why."""


def default_cache() -> Path:
    """The directory that keeps libraries between runs.

    Raises:
        NoCompiler: this user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "labinfer"
    except RuntimeError as error:
        raise NoCompiler(f"there is no place for a library: {error}") from None


def build(
    name: str,
    sources: Path,
    cache: Path,
    flags: Sequence[str] = (),
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """The library of the C++ files in ``sources`` for this machine, compiled into ``cache`` if it is not there yet.

    The file's name has a hash of the source, the flags, the compiler and the processor. The file appears under that name
    when it is complete, so several processes may build at once.

    Raises:
        NoCompiler: there is no compiler, it failed, or there is no room in ``cache``; or that belongs to another user.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    flags = (*FLAGS, *flags)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NoCompiler(f"{cache}, where libraries are kept, cannot be made ({error.strerror})") from None
    try:
        path = cache / f"{name}-{_fingerprint(sources, flags, compiler)}.so"
        _check_owner(cache, cache.stat())
        if _others_may_write(cache):
            cache.chmod(0o700)
        if path.exists():
            _check_owner(path, path.lstat())
            if not _others_may_write(path):
                return path  # else it is built anew
    except OSError as error:
        raise NoCompiler(f"{compiler}: {error}") from None
    try:
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            unfinished = Path(directory) / path.name
            files = sorted(sources.glob("*.cpp"), key=lambda file: -file.stat().st_size)  # the longest first
            objects = [str(Path(directory) / f"{file.stem}.o") for file in files]
            commands = [
                [compiler, *flags, "-c", str(file), "-o", out] for file, out in zip(files, objects, strict=True)
            ]
            _run_all(commands, on_progress)
            _run([compiler, *flags, "-shared", *objects, "-o", str(unfinished)])
            unfinished.chmod(0o700)  # whatever the umask is
            os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler}: {error}") from None
    return path


def _run_all(commands: list[list[str]], on_progress: OnProgress) -> None:
    """Run commands, as many at a time as this process has cores; see ``_run``."""
    on_progress(0, len(commands))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        running = {threads.submit(_run, command) for command in commands}
        while running:
            done, running = wait(running, LOOK_SECONDS, FIRST_COMPLETED)
            on_progress(len(commands) - len(running), len(commands))
            for each in done:
                each.result()


def _run(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        NoCompiler: it failed; the text has its first error.
        TimeoutExpired: it takes too long.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NoCompiler(f"{command[0]} failed: {reason:.300}")


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse what belongs to another user: a library runs with all that this user may do.

    Raises:
        NoCompiler: says what to do.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise NoCompiler(f"{path} belongs to user {status.st_uid}, so nothing in it is run; remove it")


def _others_may_write(path: Path) -> bool:
    """Whether members of the group or anybody may: with a umask of 002, all that was made before libraries were checked."""
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _fingerprint(sources: Path, flags: Sequence[str], compiler: str) -> str:
    program = os.stat(compiler)  # asking it for its version would start a process at every start of a run
    version = f"{os.path.realpath(compiler)} {program.st_size} {program.st_mtime_ns}"
    digest = hashlib.blake2b(digest_size=8)
    texts = [path.read_text(encoding="utf-8") for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])]
    for part in (*texts, " ".join(flags), version, processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def processor() -> str:
    """Model and features of the processor: machines of several kinds may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(fields)))
