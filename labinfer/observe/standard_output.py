"""StandardOutput: standard output that raises ``Interrupted`` if its pipe is closed, so that ``BrokenPipeError`` always means a
socket."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

from labinfer.base.errors import Interrupted

STANDARD_OUTPUT = 1


class StandardOutput(io.FileIO):
    """Standard output as a raw file over descriptor 1. The descriptor is never closed."""

    def __init__(self) -> None:
        super().__init__(STANDARD_OUTPUT, "w", closefd=False)

    def write(self, data: Any) -> int | None:
        """Write ``data``; returns the number of bytes that were written.

        Raises:
            Interrupted: the reader of the pipe, such as ``head``, has closed it (other programs get SIGPIPE then).
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise Interrupted(signal.SIGPIPE) from None


def interrupt_at_closed_output() -> None:
    """Let ``print`` raise ``Interrupted`` if the reader of standard output has closed it. Does nothing if the process started
    without descriptor 1."""
    if (stream := sys.stdout) is None:
        return
    sys.stdout = io.TextIOWrapper(
        StandardOutput() if stream.write_through else io.BufferedWriter(StandardOutput()),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
