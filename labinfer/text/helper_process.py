"""HelperProcess: a child process that answers one message at a time. Its parent can kill it at any time, even inside a library
call.

Messages and answers are bytes with a length prefix. The child process exits when its standard input closes. It also kills itself if
it does not answer within the timeout, in case the parent is gone.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import labinfer

START_SECONDS = 60.0
"""Timeout in seconds for the process to become ready."""
END_SECONDS = 1.0
"""Seconds to wait for the exit status after the process has closed its output."""
LENGTH_BYTES = 8
GRACE_SECONDS = 5
"""Seconds between the timeout of an answer and the time at which the process kills itself."""
OUT_OF_MEMORY = 12
"""Exit status of a helper process that ran out of memory (ENOMEM)."""


class HelperEnded(Exception):
    """The helper process has ended; the message says how."""


class HelperTimeout(HelperEnded):
    """The helper process did not answer within the timeout, and was killed."""


class HelperRefused(Exception):
    """The helper process has reported that it cannot answer messages; the exception's message says why."""


class HelperProcess:
    """Client of a helper process. It starts the process for the first message, and again after the process was killed.

    One thread at a time may ``ask``; any thread may call ``end`` meanwhile.

    Args:
        module: module to run with ``python -m``; it calls ``answer_messages``.
        argument: the module's only command-line argument.
        seconds: timeout of an answer, in seconds.
    """

    def __init__(self, module: str, argument: str, seconds: float):
        self._module, self.argument, self._seconds = module, argument, seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, message: bytes) -> bytes:
        """Send a message, and return the process's answer.

        Raises:
            HelperTimeout: the answer took too long; the process was killed.
            HelperEnded: the process ended before it answered.
            HelperRefused: the process could not get ready.
        """
        process = self._process if self.is_running else self._start()
        return self._within(process, self._seconds, lambda: _exchange(process, message))

    def end(self) -> None:
        """Kill the process if it is running. A thread that waits for an answer in ``ask`` gets ``HelperEnded``."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the process, and wait until it is gone. No thread may be waiting for an answer."""
        if self._process is not None:
            _reap(self._process)
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module, self.argument],
            cwd=Path(labinfer.__file__).parent.parent,  # so that the process can import labinfer
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            problem = self._within(process, START_SECONDS, lambda: _read(process.stdout)).decode()
        except HelperEnded as error:
            problem = f"{self._module} did not start: {error}"
        if problem:
            self.close()
            raise HelperRefused(problem)
        return process

    def _within(self, process: subprocess.Popen[bytes], seconds: float, call: Callable[[], bytes]) -> bytes:
        is_late, is_answered, deciding = threading.Event(), threading.Event(), threading.Lock()

        def expire() -> None:
            with deciding:
                if not is_answered.is_set():
                    is_late.set()
                    process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            answer = call()
            with deciding:  # the timer may expire right now, and kill the process under the next caller
                if is_late.is_set():
                    raise EOFError
                is_answered.set()
            return answer
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            _reap(process)
            if is_late.is_set():
                raise HelperTimeout(f"it takes more than {seconds:g} s") from None
            raise HelperEnded(_describe_end(process.returncode)) from None
        finally:
            timer.cancel()


def _exchange(process: subprocess.Popen[bytes], message: bytes) -> bytes:
    _write(process.stdin, message)
    return _read(process.stdout)


def _describe_end(status: int) -> str:
    """Describe how a process ended.

    Args:
        status: ``Popen.returncode``.
    """
    if status == OUT_OF_MEMORY:
        return "it takes too much memory"
    if status >= 0:
        return f"its process failed with exit status {status}"
    name = signal.Signals(-status).name
    may_lack_memory = -status in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # libraries abort, stacks overflow
    return f"its process was killed by {name}" + ", probably out of memory or stack" * may_lack_memory


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()


def _write(stream: BinaryIO, message: bytes) -> None:
    data = memoryview(len(message).to_bytes(LENGTH_BYTES, "little") + message)
    while data:
        data = data[stream.write(data) :]


def _read(stream: BinaryIO) -> bytes:
    """Read the next message of a stream.

    Raises:
        EOFError: the other end has closed the stream.
    """
    return _read_bytes(stream, int.from_bytes(_read_bytes(stream, LENGTH_BYTES), "little"))


def _read_bytes(stream: BinaryIO, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = stream.read(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


# Code that runs in the helper process.


def answer_messages(
    answer: Callable[[bytes], bytes], *, problem: str = "", seconds: float, most_bytes: int, stack_bytes: int = 0
) -> None:
    """Run a helper process: report that it is ready, and answer messages until the other end closes.

    Args:
        problem: reason why the process cannot do its work; empty if it can.
        seconds: timeout of an answer, in seconds.
        most_bytes: maximum address space of the process, in bytes.
        stack_bytes: stack size in bytes of the thread that answers; 0 for the default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; its exit closes standard input
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = io.FileIO(0), io.FileIO(1, "w")
    _write(stdout, problem.encode())

    def run() -> None:
        try:
            while True:
                message = _read(stdin)
                signal.alarm(int(seconds) + GRACE_SECONDS)
                _write(stdout, answer(message))
                signal.alarm(0)
        except (EOFError, BrokenPipeError):
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # noqa: BLE001 - panics of libraries, too; an exception in a thread would exit with status 0
            os._exit(1)

    threading.stack_size(stack_bytes)
    threading.Thread(target=run).start()
