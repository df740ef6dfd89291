"""ProgressLine: a line that is overwritten on a terminal, or an occasional plain line elsewhere (mpirun, logs)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from labinfer.base.standard_error import is_terminal, terminal_columns, write_error
from labinfer.observe.table import display_width

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 10.0
"""Minimum time between two updates, on a terminal and elsewhere."""
START_SECONDS = 1.5
"""Minimum time between two plain lines while ranks start, as a user is waiting."""
TICK_SECONDS = 0.5
"""Interval of a ``Ticker``."""
DEFAULT_COLUMNS = 80
"""Assumed width of a terminal that reports none."""


class ProgressLine:
    """A progress text on a stream. On a terminal it fits into one row: ``\\r`` overwrites the last row of a text only.

    Args:
        stream: standard error by default.
        plain_seconds: minimum time between two lines if ``stream`` is no terminal; doubles up to ``PLAIN_SECONDS``, as a few lines
            show that work goes on.
        at_once: whether the first update is due at once if ``stream`` is no terminal.
    """

    def __init__(self, stream: TextIO | None = None, plain_seconds: float = PLAIN_SECONDS, at_once: bool = False):
        self._stream = stream
        self._live = is_terminal(stream)
        self._seconds = LIVE_SECONDS if self._live else plain_seconds
        self._last_time = float("-inf") if self._live or at_once else None
        self._width = 0

    def due(self) -> bool:
        """Whether enough time has passed since the last update, or else since the first call; check before composing a text."""
        now = time.monotonic()
        if self._last_time is None:
            self._last_time = now
        return now - self._last_time >= self._seconds

    def update(self, text: str, ending: str = "") -> None:
        """Show ``text`` and ``ending`` now.

        Args:
            text: parts separated by commas, the most important one first: on a narrow terminal the last parts are left out.
            ending: end of the line; never left out.
        """
        self._last_time = time.monotonic()
        if not self._live:
            write_error(f"labinfer: {text}{ending}\n", self._stream)
            self._seconds = max(self._seconds, min(2 * self._seconds, PLAIN_SECONDS))
            return
        columns = self._columns()
        line = fit_parts(text, columns - display_width(ending)) + ending
        width = display_width(line)
        write_error("\r" + line + " " * (min(self._width, columns) - width), self._stream)
        self._width = width

    def close(self) -> None:
        """Clear a live line, so that the next text starts on an empty line."""
        if self._width:
            write_error("\r" + " " * min(self._width, self._columns()) + "\r", self._stream)
            self._width = 0

    def _columns(self) -> int:
        """Columns that a line may take: all but the last one, in which some terminals begin a new row. Asked anew for each line, as a
        user may resize the terminal."""
        return max(1, (terminal_columns(self._stream) or DEFAULT_COLUMNS) - 1)


def fit_parts(text: str, columns: int) -> str:
    """As many comma-separated parts of ``text`` as fit into ``columns``; if the first one does not fit, its beginning and ``…``."""
    parts = text.split(", ")
    while len(parts) > 1 and display_width(", ".join(parts)) > columns:
        parts.pop()
    text = ", ".join(parts)
    if display_width(text) <= columns:
        return text
    while text and display_width(text) >= columns:
        text = text[:-1]
    return text + "…" * (columns > 0)


class Ticker:
    """A progress line with elapsed seconds, updated by a thread: for work that reports no progress, such as imports.

    Args:
        describe: returns the text; called in the thread, may be replaced.
        plain_seconds: see ``ProgressLine``.
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
                self._line.update(self.describe(), f", {time.monotonic() - self._begin:.0f} s")

    def close(self) -> None:
        """Stop the thread, and clear the line."""
        self._ended.set()
        self._thread.join()
        self._line.close()


@contextmanager
def compile_progress(stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many C++ files are compiled, given done and total; shows nothing unless called."""
    line, begin = ProgressLine(stream, at_once=True), time.monotonic()

    def show(done: int, total: int) -> None:
        if line.due():
            seconds = time.monotonic() - begin
            line.update("compiling C++ kernels for this machine (once)", f": {done} of {total} files, {seconds:.0f} s")

    try:
        yield show
    finally:
        line.close()
