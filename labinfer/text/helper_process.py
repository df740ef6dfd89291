"""HelperProcess: a process that answers one message after another and can be ended at any time, in the middle of a call into
a library as well.

Messages and answers are bytes, each after its length. The process ends when its standard input does, and by itself when an
answer takes longer than it may: nobody may be left to end it.
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
"""Longest time in which the process gets ready."""
END_SECONDS = 1.0
"""From the end of the process's output to that of the process, in which its exit status comes."""
LENGTH_BYTES = 8
GRACE_SECONDS = 5
"""Seconds beyond its time after which a process ends itself."""
OUT_OF_MEMORY = 12
"""Exit status of a process whose memory did not suffice (ENOMEM)."""


class HelperEnded(Exception):
    """The process has ended; the text says how."""


class HelperTimeout(HelperEnded):
    """The answer took longer than it may, and the process was ended."""


class HelperRefused(Exception):
    """The process cannot do its work; the text says why."""


class HelperProcess:
    """A helper, seen from the process that asks it; it starts with the first message, and anew after it had to be ended.

    One thread at a time may ``ask``; any may ``end`` it meanwhile.

    Args:
        module: run with ``python -m``; it calls ``answer_messages``.
        argument: the module's only one.
        seconds: longest time for an answer.
    """

    def __init__(self, module: str, argument: str, seconds: float):
        self._module, self.argument, self._seconds = module, argument, seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, message: bytes) -> bytes:
        """The answer to a message.

        Raises:
            HelperTimeout: it took too long; the process is gone.
            HelperEnded: the process has ended meanwhile.
            HelperRefused: the process could not get ready.
        """
        process = self._process if self.is_running else self._start()
        return self._within(process, self._seconds, lambda: _exchange(process, message))

    def end(self) -> None:
        """End the process, if it runs; who waits for an answer gets ``HelperEnded``."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and wait until it is gone. Nobody may be waiting for an answer."""
        if self._process is not None:
            _reap(self._process)
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module, self.argument],
            cwd=Path(labinfer.__file__).parent.parent,  # so that the process finds this package
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
            with deciding:  # the time may be up at this very moment: whoever comes next is not to meet a dying process
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
    """The end of a process in words, by ``Popen.returncode``."""
    if status == OUT_OF_MEMORY:
        return "it takes too much memory"
    if status >= 0:
        return f"its process failed with exit status {status}"
    name = signal.Signals(-status).name
    may_lack_memory = -status in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # libraries end so, and full stacks
    return f"its process was ended by {name}" + ", probably for want of memory or stack" * may_lack_memory


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
    """The next message.

    Raises:
        EOFError: the other end is closed.
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


# Inside the process:


def answer_messages(
    answer: Callable[[bytes], bytes], *, problem: str = "", seconds: float, most_bytes: int, stack_bytes: int = 0
) -> None:
    """Say that this process is ready, and answer messages until the other end is closed.

    Args:
        problem: why it is not ready, if it is not.
        seconds: longest time for an answer.
        most_bytes: address space of the process.
        stack_bytes: stack of the thread that answers, where it is not to be the system's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes standard input
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
        except BaseException:  # noqa: BLE001 - a panic of a library as well; as a thread's error it would be an orderly end
            os._exit(1)

    threading.stack_size(stack_bytes)
    threading.Thread(target=run).start()
