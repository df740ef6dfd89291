"""Loader of C++ libraries: prebuilt ones of the package, or compiled once for this machine.

A library is a sealed file (``cache_file``). It is read once, its digest is compared, and exactly the verified bytes are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from labinfer.native.cache_file import (
    FORMAT,
    LOCK,
    OTHERS_WRITE,
    Damaged,
    locked,
    open_regular,
    read_sealed,
    try_lock,
    write_sealed,
)
from labinfer.native.targets import TARGETS, Target

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-Wno-psabi")
COMPILERS = ("g++", "c++", "clang++")
PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder of prebuilt libraries; exists in wheels made by ``make wheel``."""
PREBUILT_FLAGS = ("-static-libstdc++", "-Wl,--exclude-libs,ALL,--gc-sections", "-s")
"""Link flags of prebuilt libraries: other machines may have an older libstdc++."""
TIME_LIMIT = 600
"""Timeout of one compilation in seconds."""
WAIT_LIMIT = 1200
"""Time in seconds that a process waits for another process to compile the library, before it compiles the library itself."""
REPORT_SECONDS = 0.2
"""Seconds between two progress reports of a compilation."""

COMPILING = "compiling-"
"""Prefix of temporary directories of compilations in the cache."""
ABANDONED_SECONDS = 3600
"""Age in seconds from which a temporary directory or lock file counts as abandoned."""

OnProgress = Callable[[int, int], None]
"""Called with the number of compiled files and of all files: before the first, and repeatedly until the last."""


class NoCompiler(Exception):
    """No library is available; the message says why."""


def default_cache() -> Path:
    """Directory that caches libraries between runs.

    Raises:
        NoCompiler: the user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "labinfer"
    except RuntimeError as error:
        raise NoCompiler(f"no directory for compiled libraries: {error}") from None


def load(
    name: str,
    sources: Path,
    cache: Path | None = None,
    flags: Sequence[str] = (),
    on_progress: OnProgress = lambda done, total: None,
    *,
    target: Target | None = None,
    only_ready: bool = False,
) -> ctypes.CDLL:
    """Load the library of the C++ files in ``sources``: a prebuilt one, if it was made from equal files and this machine can run it, else
    one from ``cache``, which is compiled first if missing.

    The name of a compiled file has a hash of the sources, the flags, the compiler and the processor. If several processes need it at
    once, one compiles it and the others wait. A file that is damaged, or that another user may have written, is compiled again.

    Args:
        cache: folder of compiled libraries; None for ``default_cache()``.
        target: processor to compile for, which may be that of another machine; None for this machine's.
        only_ready: whether to raise ``NoCompiler`` instead of compiling.

    Raises:
        NoCompiler: no compiler is available, it failed, or ``cache`` is full or belongs to another user.
        OSError: the library cannot be loaded.
    """
    prebuilt = _load_prebuilt(name, sources, flags, TARGETS if target is None else (target,))
    if prebuilt is not None:
        return prebuilt
    cache = default_cache() if cache is None else cache
    compiler = find_compiler(target)
    flags = (*FLAGS, *(("-march=native",) if target is None else target.flags), *flags)
    _prepare_folder(cache)
    try:
        path = cache / f"{name}-{_fingerprint(sources, flags, compiler, target)}.so"
    except OSError as error:
        raise NoCompiler(f"{compiler}: {error}") from None
    try:
        return _open(path, read_sealed(path))
    except FileNotFoundError:
        pass
    except Damaged as error:
        logger.warning("%s is ignored (%s); compiling again", path, error)
    if only_ready:
        raise NoCompiler(f"{path} is not compiled yet")

    def say_wait() -> None:
        logger.warning("another process is compiling %s; waiting for it for up to %d s", path, WAIT_LIMIT)

    with locked(path.with_suffix(LOCK), WAIT_LIMIT, say_wait):
        os.listdir(cache)  # makes an NFS client refresh its directory listing
        with contextlib.suppress(FileNotFoundError, Damaged):
            return _open(path, read_sealed(path))
        content = _compile([compiler, *flags], sources, cache, on_progress)
        try:
            write_sealed(path, content, mode=0o700)
        except OSError as error:
            logger.warning("%s could not be cached for the next start: %s", path, error)
    return _open(path, content)


def build_prebuilt(name: str, sources: Path, folder: Path, flags: Sequence[str], target: Target) -> Path:
    """Compile the library of the C++ files in ``sources`` for ``target`` into ``folder``, under the name that ``load`` expects.

    Raises:
        NoCompiler: no compiler for ``target`` is available, or it failed.
        OSError: the file cannot be written.
    """
    path = folder / _prebuilt_name(name, sources, flags, target)
    command = [find_compiler(target), *FLAGS, *target.flags, *flags]
    write_sealed(path, _compile(command, sources, folder, link_flags=PREBUILT_FLAGS), mode=0o755)
    return path


def find_compiler(target: Target | None = None) -> str:
    """Path of the C++ compiler for this machine, or for ``target``.

    Raises:
        NoCompiler: no compiler is available.
    """
    names = COMPILERS
    if target is not None and target.machine != platform.machine():
        names = (f"{target.machine}-linux-gnu-g++",)
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler found ({', '.join(names)})")
    return compiler


def _load_prebuilt(name: str, sources: Path, flags: Sequence[str], targets: Sequence[Target]) -> ctypes.CDLL | None:
    """Load a prebuilt library for the first of ``targets`` that fits; None if none does. Does not check the library's owner and
    mode, which are those of the package's files."""
    if not PREBUILT.is_dir():
        return None
    for target in targets:
        path = PREBUILT / _prebuilt_name(name, sources, flags, target)
        if not target.runs_here():
            continue
        try:
            return _open(path, read_sealed(path, open_regular))
        except FileNotFoundError:
            continue
        except Damaged as error:
            logger.warning("%s, which is part of LABInfer, is ignored (%s); reinstall the wheel", path, error)
        except OSError as error:  # built for a newer system
            logger.info("%s, which is part of LABInfer, does not run on this machine: %s", path.name, error)
    return None


@functools.cache
def _open(path: Path, content: bytes) -> ctypes.CDLL:
    """Load a library from the verified bytes, so that later changes of the file have no effect on this process.

    Cached, as the dynamic loader caches by path: a process has one copy of a library's variables, such as its thread pool.

    Raises:
        OSError: the library cannot be loaded.
    """
    try:
        with contextlib.ExitStack() as on_failure:
            descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
            on_failure.callback(os.close, descriptor)
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(content)
            opened = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
            # The descriptor stays open: the dynamic loader takes a reused name for the library that had it before.
            on_failure.pop_all()
    except OSError as error:  # some systems do not execute memfd memory (vm.memfd_noexec, SELinux)
        opened = _open_file(path, content, error)
    return ctypes.CDLL(str(path), handle=opened._handle)


def _open_file(path: Path, content: bytes, problem: OSError) -> ctypes.CDLL:
    """Load a library from its file, if the file still has ``content``.

    Raises:
        OSError: the content has changed (raises ``problem``), or the file cannot be loaded.
    """
    try:
        file = open_regular(path)
    except (Damaged, FileNotFoundError):
        raise problem from None
    with file:
        if not file.read().startswith(content):
            raise problem
        return ctypes.CDLL(f"/proc/self/fd/{os.dup(file.fileno())}")  # a new descriptor, which stays open


def _prebuilt_name(name: str, sources: Path, flags: Sequence[str], target: Target) -> str:
    return f"{name}-{target.name}-{_digest(sources, [*FLAGS, *target.flags, *flags])}.so"


def _compile(
    command: Sequence[str],
    sources: Path,
    folder: Path,
    on_progress: OnProgress = lambda done, total: None,
    *,
    link_flags: Sequence[str] = (),
) -> bytes:
    """Compile and link with the compiler and flags of ``command``, in a temporary directory in ``folder``.

    Raises:
        NoCompiler: the compiler failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=COMPILING, dir=folder) as directory:
            _remove_abandoned(folder, os.stat(directory).st_mtime)
            linked = Path(directory) / "linked.so"
            files = sorted(sources.glob("*.cpp"), key=lambda file: -file.stat().st_size)  # the slowest first
            objects = [str(Path(directory) / f"{file.stem}.o") for file in files]
            commands = [[*command, "-c", str(file), "-o", out] for file, out in zip(files, objects, strict=True)]
            _run_all(commands, on_progress)
            _run([*command, *link_flags, "-shared", *objects, "-o", str(linked)])
            return linked.read_bytes()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]}: {error}") from None


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove leftovers of killed processes: directories of compilations, and lock files that no process holds.

    Args:
        now: current time of the file system's clock, which may be another machine's.
    """
    for path in folder.glob(f"{COMPILING}*"):
        with contextlib.suppress(OSError):  # another process has removed it
            if now - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)
    for path in folder.glob(f"*{LOCK}"):
        with contextlib.suppress(OSError, Damaged), open_regular(path) as file:
            if now - path.stat().st_mtime > ABANDONED_SECONDS and try_lock(file):
                path.unlink()


def _run_all(commands: list[list[str]], on_progress: OnProgress) -> None:
    """Run commands in parallel, at most one per core of this process; see ``_run``."""
    on_progress(0, len(commands))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        running = {threads.submit(_run, command) for command in commands}
        while running:
            done, running = wait(running, REPORT_SECONDS, FIRST_COMPLETED)
            on_progress(len(commands) - len(running), len(commands))
            for each in done:
                each.result()


def _run(command: list[str]) -> None:
    """Run one command of the compiler.

    Raises:
        NoCompiler: the compiler failed; the message has its first error.
        TimeoutExpired: the compiler ran for more than ``TIME_LIMIT``.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NoCompiler(f"{command[0]} failed: {reason:.300}")


def _prepare_folder(cache: Path) -> None:
    """Make the cache folder, in which only this user may write.

    Raises:
        NoCompiler: the folder cannot be made, or belongs to another user: a library runs with all rights of this user.
    """
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise NoCompiler(f"{cache} belongs to user {status.st_uid}, so the libraries in it are not used; delete it")
        if status.st_mode & OTHERS_WRITE:
            cache.chmod(0o700)
    except OSError as error:
        raise NoCompiler(
            f"{cache}, the directory for compiled libraries, cannot be created ({error.strerror})"
        ) from None


def _fingerprint(sources: Path, flags: Sequence[str], compiler: str, target: Target | None) -> str:
    program = os.stat(compiler)  # asking the compiler for its version would start a process in every run
    version = f"{os.path.realpath(compiler)} {program.st_size} {program.st_mtime_ns}"
    return _digest(sources, [*flags, version, processor() if target is None else target.name])


def _digest(sources: Path, parts: Sequence[str]) -> str:
    """Short hash of the C++ files in ``sources`` and of ``parts``."""
    digest = hashlib.blake2b(digest_size=8)
    parts = [str(FORMAT), *parts]
    texts = [path.read_text(encoding="utf-8") for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])]
    for part in (*texts, *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def processor() -> str:
    """Model and features of this machine's processor: machines of several kinds may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(fields)))


def c_library() -> str:
    """Name and version of the C library, such as "glibc 2.36"; empty if the library does not report them."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""
