"""LineWriter: writes log lines in a thread of its own, so that callers never block."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

MAX_LINES = 10_000
"""Maximum number of lines that wait to be written; further lines are lost."""
CLOSE_SECONDS = 1.0
"""Maximum seconds for which ``close`` waits until all lines are written."""


class LineWriter:
    """A stream for log lines that never blocks an event loop. Standard error may stay unread for long, for example if
    the launcher is stopped, or its terminal is paused (Ctrl-S). The pipe to it is then full after some hundred lines,
    and blocks every writer.

    Args:
        descriptor: file descriptor to write to.
    """

    def __init__(self, descriptor: int):
        self._descriptor, self._num_lost = descriptor, 0
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def write(self, text: str) -> None:
        """Enqueue ``text``, one or more whole lines."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Do nothing: the thread writes lines as soon as possible."""

    def close(self) -> None:
        """Wait until all lines are written, at most ``CLOSE_SECONDS``."""
        until = time.monotonic() + CLOSE_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def _write_lines(self) -> None:
        while True:
            text = self._lines.get()
            if self._num_lost and self._lines.empty():
                num_lost, self._num_lost = self._num_lost, 0
                text += f"labinfer: {num_lost} log lines were dropped, because standard error was not read\n"
            with contextlib.suppress(OSError):  # a failing log must not end the process
                # Not by sys.stderr, whose lock this blocked thread would hold: the process would wait for it at exit.
                view = memoryview(text.encode(errors="backslashreplace"))
                while view:  # a signal may interrupt a write to a pipe after a part of the line
                    view = view[os.write(self._descriptor, view) :]
            self._lines.task_done()
