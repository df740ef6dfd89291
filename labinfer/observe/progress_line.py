"""ProgressLine: a line that is overwritten on a terminal, and a plain line now and then elsewhere (mpirun, logs)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from labinfer.base.standard_error import is_terminal, write_error

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 10.0
"""Least time between two updates, on a terminal and elsewhere."""
START_SECONDS = 1.5
"""The same elsewhere while ranks start: somebody is waiting, who may be new."""
TICK_SECONDS = 0.5
"""Between two signs of life of a ``Ticker``."""


class ProgressLine:
    """Progress in words.

    Args:
        stream: standard error by default.
        plain_seconds: least time between two lines where it is no terminal.
        at_once: whether the first update is due at once there, too.
    """

    def __init__(self, stream: TextIO | None = None, plain_seconds: float = PLAIN_SECONDS, at_once: bool = False):
        self._stream = stream
        self._live = is_terminal(stream)
        self._seconds = LIVE_SECONDS if self._live else plain_seconds
        self._last_time = float("-inf") if self._live or at_once else None
        self._width = 0

    def due(self) -> bool:
        """Whether enough time has passed for another update, or since the first question; ask before composing one."""
        now = time.monotonic()
        if self._last_time is None:
            self._last_time = now
        return now - self._last_time >= self._seconds

    def update(self, text: str) -> None:
        """Show ``text`` now."""
        self._last_time = time.monotonic()
        if self._live:
            write_error("\r" + text.ljust(self._width), self._stream)
            self._width = len(text)
        else:
            write_error(f"labinfer: {text}\n", self._stream)

    def close(self) -> None:
        """Clear a live line, so that the next text starts on an empty one."""
        if self._width:
            write_error("\r" + " " * self._width + "\r", self._stream)
            self._width = 0


class Ticker:
    """A progress line with the seconds it has taken so far, from a thread: for what says nothing of itself, as imports.

    Args:
        describe: what is being done; called from the thread, may be replaced.
        plain_seconds: as for ``ProgressLine``.
    """

    def __init__(self, describe: Callable[[], str], stream: TextIO | None = None, plain_seconds: float = PLAIN_SECONDS):
        self.describe = describe
        self._line, self._begin = ProgressLine(stream, plain_seconds), time.monotonic()
        if self._line.due():  # on a terminal
            self._line.update(describe())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            if self._line.due():
                self._line.update(f"{self.describe()}, {time.monotonic() - self._begin:.0f} s")

    def close(self) -> None:
        """Clear the line; it does not come again."""
        self._ended.set()
        self._thread.join()
        self._line.close()


@contextmanager
def compile_progress(stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A function that says how many files of C++ are compiled, and of how many; says nothing unless it is called."""
    line, begin = ProgressLine(stream, at_once=True), time.monotonic()

    def show(done: int, total: int) -> None:
        if line.due():
            seconds = time.monotonic() - begin
            line.update(
                f"compiling C++ functions for this machine, only once: {done} of {total} files, {seconds:.0f} s"
            )

    try:
        yield show
    finally:
        line.close()
