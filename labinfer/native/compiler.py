"""Libraries of C functions from folders of C++ files: those that came with the package, or compiled once for this machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from labinfer.native.targets import TARGETS, Target

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-Wno-psabi")
COMPILERS = ("g++", "c++", "clang++")
PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries that came with the package; there are some in a wheel that ``make wheel`` made."""
PREBUILT_FLAGS = ("-static-libstdc++", "-Wl,--exclude-libs,ALL,--gc-sections", "-s")
"""For linking those: other machines may have an older libstdc++."""
TIME_LIMIT = 120
"""Seconds of one compilation."""
LOOK_SECONDS = 0.2
"""Between two reports of how far it is."""

UNFINISHED = "compiling-"
"""Begins the names of directories that hold what is compiled, in the cache."""
ABANDONED_SECONDS = 3600
"""After so long without a new file nobody compiles in such a directory."""

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
    cache: Path | None = None,
    flags: Sequence[str] = (),
    on_progress: OnProgress = lambda done, total: None,
    *,
    target: Target | None = None,
) -> Path:
    """The library of the C++ files in ``sources`` for this machine: the one that came with the package, if it was made of the
    same files and this processor and its system can run it, else compiled into ``cache`` if it is not there yet.

    A compiled file's name has a hash of the source, the flags, the compiler and the processor. The file appears under that name
    when it is complete, so several processes may build at once.

    Args:
        cache: None for ``default_cache()``.
        target: compiles for that kind of processor instead, also of another machine.

    Raises:
        NoCompiler: there is no compiler, it failed, or there is no room in ``cache``; or that belongs to another user.
    """
    if target is None:
        prebuilt = _find_prebuilt(name, sources, flags)
        if prebuilt is not None:
            return prebuilt
    cache = default_cache() if cache is None else cache
    compiler = find_compiler(target)
    flags = (*FLAGS, *(("-march=native",) if target is None else target.flags), *flags)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NoCompiler(f"{cache}, where libraries are kept, cannot be made ({error.strerror})") from None
    try:
        path = cache / f"{name}-{_fingerprint(sources, flags, compiler, target)}.so"
        _check_owner(cache, cache.stat())
        if _others_may_write(cache):
            cache.chmod(0o700)
        if path.exists():
            _check_owner(path, path.lstat())
            if not _others_may_write(path):
                return path  # else it is built anew
    except OSError as error:
        raise NoCompiler(f"{compiler}: {error}") from None
    _compile([compiler, *flags], sources, path, on_progress)
    return path


def build_prebuilt(name: str, sources: Path, folder: Path, flags: Sequence[str], target: Target) -> Path:
    """The library of the C++ files in ``sources`` for a kind of processor, compiled into ``folder`` as ``build`` looks for it.

    Raises:
        NoCompiler: there is none for that kind, or it failed.
    """
    path = folder / _prebuilt_name(name, sources, flags, target)
    _compile([find_compiler(target), *FLAGS, *target.flags, *flags], sources, path, link_flags=PREBUILT_FLAGS)
    path.chmod(0o755)
    return path


def find_compiler(target: Target | None = None) -> str:
    """The path of the C++ compiler for this machine, or for that of ``target``.

    Raises:
        NoCompiler: there is none.
    """
    names = COMPILERS
    if target is not None and target.machine != platform.machine():
        names = (f"{target.machine}-linux-gnu-g++",)
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"there is no C++ compiler ({', '.join(names)})")
    return compiler


def _find_prebuilt(name: str, sources: Path, flags: Sequence[str]) -> Path | None:
    if not PREBUILT.is_dir():
        return None
    for target in TARGETS:
        path = PREBUILT / _prebuilt_name(name, sources, flags, target)
        if not path.exists() or not target.runs_here():
            continue
        try:
            ctypes.CDLL(str(path))
        except OSError as error:  # made for a newer system
            logger.info("%s, which came with LABInfer, cannot be used here: %s", path.name, error)
            continue
        return path
    return None


def _prebuilt_name(name: str, sources: Path, flags: Sequence[str], target: Target) -> str:
    return f"{name}-{target.name}-{_digest(sources, [*FLAGS, *target.flags, *flags])}.so"


def _compile(
    command: Sequence[str],
    sources: Path,
    path: Path,
    on_progress: OnProgress = lambda done, total: None,
    *,
    link_flags: Sequence[str] = (),
) -> None:
    """Compile and link with the compiler and flags of ``command``; ``path`` appears when it is complete.

    Raises:
        NoCompiler: the compiler failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as directory:
            _remove_abandoned(path.parent, os.stat(directory).st_mtime)
            unfinished = Path(directory) / path.name
            files = sorted(sources.glob("*.cpp"), key=lambda file: -file.stat().st_size)  # the longest first
            objects = [str(Path(directory) / f"{file.stem}.o") for file in files]
            commands = [[*command, "-c", str(file), "-o", out] for file, out in zip(files, objects, strict=True)]
            _run_all(commands, on_progress)
            _run([*command, *link_flags, "-shared", *objects, "-o", str(unfinished)])
            unfinished.chmod(0o700)  # whatever the umask is
            os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]}: {error}") from None


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove what compilations left that were killed.

    Args:
        now: by the clock of the file system, which may be another machine's.
    """
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if now - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)


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


def _fingerprint(sources: Path, flags: Sequence[str], compiler: str, target: Target | None) -> str:
    program = os.stat(compiler)  # asking it for its version would start a process at every start of a run
    version = f"{os.path.realpath(compiler)} {program.st_size} {program.st_mtime_ns}"
    return _digest(sources, [*flags, version, processor() if target is None else target.name])


def _digest(sources: Path, parts: Sequence[str]) -> str:
    """A short hash of the C++ files in ``sources`` and of some texts."""
    digest = hashlib.blake2b(digest_size=8)
    texts = [path.read_text(encoding="utf-8") for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])]
    for part in (*texts, *parts):
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
