"""StandardOutput: standard output whose closed pipe raises ``Interrupted``, so that it differs from a broken pipe of a socket."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

from labinfer.base.errors import Interrupted

STANDARD_OUTPUT = 1


class StandardOutput(io.FileIO):
    """Standard output as a raw file over descriptor 1, which it never closes."""

    def __init__(self) -> None:
        super().__init__(STANDARD_OUTPUT, "w", closefd=False)

    def write(self, data: Any) -> int | None:
        """Write bytes; returns how many were written.

        Raises:
            Interrupted: the reader of the pipe, such as ``head``, has closed it; as by SIGPIPE.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise Interrupted(signal.SIGPIPE) from None


def interrupt_at_closed_output() -> None:
    """Let ``print`` raise ``Interrupted`` if the reader of standard output has closed it. Does nothing if descriptor 1 was closed at the
    start of the process."""
    if (stream := sys.stdout) is None:
        return
    sys.stdout = io.TextIOWrapper(
        StandardOutput() if stream.write_through else io.BufferedWriter(StandardOutput()),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
