"""Libraries of C functions from folders of C++ files: those that came with the package, or compiled once for this machine.

A library is a sealed file (``cache_file``). It is read once, its digest is compared, and the bytes that were compared are loaded.
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
"""Libraries that came with the package; there are some in a wheel that ``make wheel`` made."""
PREBUILT_FLAGS = ("-static-libstdc++", "-Wl,--exclude-libs,ALL,--gc-sections", "-s")
"""For linking those: other machines may have an older libstdc++."""
TIME_LIMIT = 600
"""Seconds of one compilation."""
WAIT_LIMIT = 1200
"""Seconds that a process waits for another one that compiles the same library, before it compiles by itself."""
LOOK_SECONDS = 0.2
"""Between two reports of how far it is."""

COMPILING = "compiling-"
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


def load(
    name: str,
    sources: Path,
    cache: Path | None = None,
    flags: Sequence[str] = (),
    on_progress: OnProgress = lambda done, total: None,
    *,
    target: Target | None = None,
) -> ctypes.CDLL:
    """The library of the C++ files in ``sources`` for this machine: the one that came with the package, if it was made of the
    same files and this processor and its system can run it, else compiled into ``cache`` if it is not there yet.

    A compiled file's name has a hash of the source, the flags, the compiler and the processor. Of several processes that need it
    at once, one compiles and the others wait. A file that is damaged, or that another user may have written, is compiled anew.

    Args:
        cache: None for ``default_cache()``.
        target: compiles for that kind of processor instead, also of another machine.

    Raises:
        NoCompiler: there is no compiler, it failed, or there is no room in ``cache``; or that belongs to another user.
        OSError: the library cannot be loaded.
    """
    if target is None:
        prebuilt = _load_prebuilt(name, sources, flags)
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
        logger.warning("%s is not used (%s); it is compiled anew", path, error)

    def say_wait() -> None:
        logger.warning("another process compiles %s; this one waits for it, for %d s at most", path, WAIT_LIMIT)

    with locked(path.with_suffix(LOCK), WAIT_LIMIT, say_wait):
        os.listdir(cache)  # a client of NFS asks its server again which files there are
        with contextlib.suppress(FileNotFoundError, Damaged):
            return _open(path, read_sealed(path))
        content = _compile([compiler, *flags], sources, cache, on_progress)
        try:
            write_sealed(path, content, mode=0o700)
        except OSError as error:
            logger.warning("%s could not be kept for the next start: %s", path, error)
    return _open(path, content)


def build_prebuilt(name: str, sources: Path, folder: Path, flags: Sequence[str], target: Target) -> Path:
    """The library of the C++ files in ``sources`` for a kind of processor, compiled into ``folder`` as ``load`` looks for it.

    Raises:
        NoCompiler: there is none for that kind, or it failed.
        OSError: it cannot be written.
    """
    path = folder / _prebuilt_name(name, sources, flags, target)
    command = [find_compiler(target), *FLAGS, *target.flags, *flags]
    write_sealed(path, _compile(command, sources, folder, link_flags=PREBUILT_FLAGS), mode=0o755)
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


def _load_prebuilt(name: str, sources: Path, flags: Sequence[str]) -> ctypes.CDLL | None:
    """The library that came with the package; its owner and mode are those of the Python files beside it."""
    if not PREBUILT.is_dir():
        return None
    for target in TARGETS:
        path = PREBUILT / _prebuilt_name(name, sources, flags, target)
        if not target.runs_here():
            continue
        try:
            return _open(path, read_sealed(path, open_regular))
        except FileNotFoundError:
            continue
        except Damaged as error:
            logger.warning("%s, which came with LABInfer, is not used (%s); install the wheel again", path, error)
        except OSError as error:  # made for a newer system
            logger.info("%s, which came with LABInfer, cannot be used here: %s", path.name, error)
    return None


@functools.cache
def _open(path: Path, content: bytes) -> ctypes.CDLL:
    """Load a library from the bytes that were compared with its digest, so that no later change of the file reaches this process.

    Cached, as the dynamic loader does with paths: a process has one copy of a library's variables, such as its team of threads.

    Raises:
        OSError: it cannot be loaded.
    """
    try:
        with contextlib.ExitStack() as on_failure:
            descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
            on_failure.callback(os.close, descriptor)
            with open(descriptor, "wb", closefd=False) as memory:
                memory.write(content)
            opened = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
            # The descriptor stays open: the dynamic loader takes a name that it has seen before for the same library.
            on_failure.pop_all()
    except OSError as error:  # a system may run nothing from such memory (vm.memfd_noexec, SELinux)
        opened = _open_file(path, content, error)
    return ctypes.CDLL(str(path), handle=opened._handle)


def _open_file(path: Path, content: bytes, problem: OSError) -> ctypes.CDLL:
    """Load a library from its file, if that still has this content.

    Raises:
        OSError: ``problem`` if it has not; or the file cannot be loaded.
    """
    try:
        file = open_regular(path)
    except (Damaged, FileNotFoundError):
        raise problem from None
    with file:
        if not file.read().startswith(content):
            raise problem
        return ctypes.CDLL(f"/proc/self/fd/{os.dup(file.fileno())}")  # a number of its own, which stays open


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
    """Compile and link with the compiler and flags of ``command``, in a directory of its own in ``folder``.

    Raises:
        NoCompiler: the compiler failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=COMPILING, dir=folder) as directory:
            _remove_abandoned(folder, os.stat(directory).st_mtime)
            linked = Path(directory) / "linked.so"
            files = sorted(sources.glob("*.cpp"), key=lambda file: -file.stat().st_size)  # the longest first
            objects = [str(Path(directory) / f"{file.stem}.o") for file in files]
            commands = [[*command, "-c", str(file), "-o", out] for file, out in zip(files, objects, strict=True)]
            _run_all(commands, on_progress)
            _run([*command, *link_flags, "-shared", *objects, "-o", str(linked)])
            return linked.read_bytes()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]}: {error}") from None


def _remove_abandoned(folder: Path, now: float) -> None:
    """Remove what killed processes left: directories of compilations, and lock files that nobody holds.

    Args:
        now: by the clock of the file system, which may be another machine's.
    """
    for path in folder.glob(f"{COMPILING}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if now - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)
    for path in folder.glob(f"*{LOCK}"):
        with contextlib.suppress(OSError, Damaged), open_regular(path) as file:
            if now - path.stat().st_mtime > ABANDONED_SECONDS and try_lock(file):
                path.unlink()


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


def _prepare_folder(cache: Path) -> None:
    """Make the folder of the cache, in which only this user may write.

    Raises:
        NoCompiler: it cannot be made, or belongs to another user: a library runs with all that this user may do.
    """
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise NoCompiler(f"{cache} belongs to user {status.st_uid}, so nothing in it is run; remove it")
        if status.st_mode & OTHERS_WRITE:
            cache.chmod(0o700)
    except OSError as error:
        raise NoCompiler(f"{cache}, where libraries are kept, cannot be made ({error.strerror})") from None


def _fingerprint(sources: Path, flags: Sequence[str], compiler: str, target: Target | None) -> str:
    program = os.stat(compiler)  # asking it for its version would start a process at every start of a run
    version = f"{os.path.realpath(compiler)} {program.st_size} {program.st_mtime_ns}"
    return _digest(sources, [*flags, version, processor() if target is None else target.name])


def _digest(sources: Path, parts: Sequence[str]) -> str:
    """A short hash of the C++ files in ``sources`` and of some texts."""
    digest = hashlib.blake2b(digest_size=8)
    parts = [str(FORMAT), *parts]
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
