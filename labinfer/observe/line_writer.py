"""LineWriter: lines of a log, written by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

MAX_LINES = 10_000
"""Lines that wait to be read; what comes then is lost."""
CLOSE_SECONDS = 1.0
"""For the last lines to be read."""


class LineWriter:
    """A stream on which no event loop waits. Standard error may go unread for long: its launcher is stopped, its terminal held
    (Ctrl-S). A pipe is full after some hundred lines then, and whoever writes to it stands still.

    Args:
        descriptor: where the lines go.
    """

    def __init__(self, descriptor: int):
        self._descriptor, self._num_lost = descriptor, 0
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def write(self, text: str) -> None:
        """Have a whole line written, in its turn."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Nothing: lines are written as soon as they can be."""

    def close(self) -> None:
        """Wait for what has not been written, if that takes no longer than ``CLOSE_SECONDS``."""
        until = time.monotonic() + CLOSE_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def _write_lines(self) -> None:
        while True:
            text = self._lines.get()
            if self._num_lost and self._lines.empty():
                num_lost, self._num_lost = self._num_lost, 0
                text += f"labinfer: {num_lost} more lines of this log are lost, as nobody read it\n"
            with contextlib.suppress(OSError):  # a log that cannot be written is no reason to fail
                # Not by way of sys.stderr: its lock, held here, would be waited for when the process ends.
                view = memoryview(text.encode(errors="backslashreplace"))
                while view:  # a signal may end a write to a pipe after a part of the line
                    view = view[os.write(self._descriptor, view) :]
            self._lines.task_done()
