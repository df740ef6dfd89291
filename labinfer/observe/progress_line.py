"""ProgressLine: a progress text that is updated in place on a terminal; elsewhere (under mpirun, in logs), a plain line from time
to time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from labinfer.base.standard_error import is_terminal, terminal_columns, write_error
from labinfer.observe.table import display_width, format_bytes

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 10.0
"""Minimum seconds between two updates: on a terminal, and on another stream."""
START_SECONDS = 1.5
"""Minimum seconds between two plain lines while ranks start; a user is waiting then."""
TICK_SECONDS = 0.5
"""Seconds between two updates of a ``Ticker``."""
BAR_COLUMNS = 10
"""Width of the bar of a ``TransferLine``."""
DEFAULT_COLUMNS = 80
"""Assumed width, in columns, of a terminal that does not report its width."""


class ProgressLine:
    """A progress text on a stream. On a terminal the text must fit into one row, as ``\\r`` only returns to the beginning of
    the last row.

    Args:
        stream: standard error by default.
        plain_seconds: minimum seconds between the first two lines if ``stream`` is not a terminal. The interval doubles after each
            line, up to ``PLAIN_SECONDS``.
        at_once: whether the first update is due at once if ``stream`` is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, plain_seconds: float = PLAIN_SECONDS, at_once: bool = False):
        self._stream = stream
        self._live = is_terminal(stream)
        self._seconds = LIVE_SECONDS if self._live else plain_seconds
        self._last_time = float("-inf") if self._live or at_once else None
        self._width = 0

    def due(self) -> bool:
        """Whether an update is due: enough time has passed since the last update, or since the first call. Check it before
        composing the text of an update."""
        now = time.monotonic()
        if self._last_time is None:
            self._last_time = now
        return now - self._last_time >= self._seconds

    def update(self, text: str, ending: str = "") -> None:
        """Show ``text`` and ``ending`` now.

        Args:
            text: parts separated by commas, the most important first: on a narrow terminal the last parts are left out.
            ending: text at the end of the line that is never left out.
        """
        self._last_time = time.monotonic()
        if not self._live:
            write_error(f"labinfer: {text}{ending}\n", self._stream)
            self._seconds = max(self._seconds, min(2 * self._seconds, PLAIN_SECONDS))
            return
        columns = self._columns()
        line = fit_parts(text, columns - display_width(ending)) + ending
        width = display_width(line)
        # The cursor returns to the beginning of the row, so that a log message of any process overwrites the line.
        write_error("\r" + line + " " * (min(self._width, columns) - width) + "\r", self._stream)
        self._width = width

    def close(self) -> None:
        """On a terminal, clear the progress text, so that the next text starts on an empty line."""
        if self._width:
            write_error("\r" + " " * min(self._width, self._columns()) + "\r", self._stream)
            self._width = 0

    def _columns(self) -> int:
        """Number of terminal columns that a line may use: all but the last one, after which some terminals begin a new row. Read
        anew for each line, as a user may resize the terminal."""
        return max(1, (terminal_columns(self._stream) or DEFAULT_COLUMNS) - 1)


def fit_parts(text: str, columns: int) -> str:
    """Shorten ``text`` to as many of its comma-separated parts as fit into ``columns``. If not even the first part fits, it is cut
    off and ends in ``…``."""
    parts = text.split(", ")
    while len(parts) > 1 and display_width(", ".join(parts)) > columns:
        parts.pop()
    text = ", ".join(parts)
    if display_width(text) <= columns:
        return text
    while text and display_width(text) >= columns:
        text = text[:-1]
    return text + "…" * (columns > 0)


class TransferLine:
    """A progress line of bytes that are read or written: how many of how many, the mean rate, and the time left.

    Args:
        what: name of the transfer in the line, such as ``loading weights``.
        ending: see ``ProgressLine.update``.
        at_once: see ``ProgressLine``.
    """

    def __init__(self, what: str, ending: str = "", stream: TextIO | None = None, at_once: bool = False):
        self._what, self._ending = what, ending
        self._line, self._rate = ProgressLine(stream, START_SECONDS, at_once), TransferRate()

    def show(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are transferred, if an update is due."""
        self._rate.note(done)
        if self._line.due():
            bar = "#" * (BAR_COLUMNS * done // total)
            text = f"{self._what}: {self._rate.describe(done, total)}, [{bar:.<{BAR_COLUMNS}}]"
            self._line.update(text, self._ending)

    def close(self) -> None:
        """See ``ProgressLine.close``."""
        self._line.close()


class TransferRate:
    """Mean rate of a transfer since the first call of ``note``."""

    def __init__(self) -> None:
        self._begin: tuple[float, int] | None = None

    def note(self, done: int) -> None:
        """Note that ``done`` bytes are transferred; the first call starts the clock."""
        if self._begin is None:
            self._begin = time.monotonic(), done

    def describe(self, done: int, total: int) -> str:
        """Text such as ``3.1 GiB of 7.5 GiB, 610.0 MiB/s, 7 s left``; without rate and time as long as there is no rate."""
        begin, first = self._begin or (time.monotonic(), done)
        seconds, text = time.monotonic() - begin, f"{format_bytes(done)} of {format_bytes(total)}"
        if done <= first or not seconds:
            return text
        rate = (done - first) / seconds
        return f"{text}, {format_bytes(rate)}/s, {(total - done) / rate:.0f} s left"


class Ticker:
    """A progress line with the elapsed seconds, updated by a thread. For work that reports no progress, such as
    imports.

    Args:
        describe: returns the text. The thread calls it; the attribute may be replaced at any time.
        plain_seconds: see ``ProgressLine``.
    """

    def __init__(self, describe: Callable[[], str], stream: TextIO | None = None, plain_seconds: float = PLAIN_SECONDS):
        self.describe = describe
        self._line, self._begin = ProgressLine(stream, plain_seconds), time.monotonic()
        if self._line.due():  # due at once on a terminal
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
    """Context with a function ``show(done, total)``, which shows the number of compiled C++ files. Nothing is shown before its
    first call."""
    line, begin = ProgressLine(stream, at_once=True), time.monotonic()

    def show(done: int, total: int) -> None:
        if line.due():
            seconds = time.monotonic() - begin
            line.update("compiling C++ kernels for this machine (once)", f": {done} of {total} files, {seconds:.0f} s")

    try:
        yield show
    finally:
        line.close()
