"""A line on a terminal that is written over as things move on; nothing but its last state elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

UPDATE_SECONDS = 0.2


class ProgressLine:
    """One live line on ``stream`` (standard error)."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._last_time = 0.0
        self._width = 0

    def due(self) -> bool:
        """Whether enough time has passed for another update; ask before composing one."""
        return self._live and time.monotonic() - self._last_time >= UPDATE_SECONDS

    def update(self, text: str) -> None:
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width, self._last_time = len(text), time.monotonic()

    def close(self) -> None:
        """Clear the line, so that what follows starts on an empty one."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
