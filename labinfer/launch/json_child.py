"""``JsonChild``: a module of this package as a child process, with a JSON request and JSON lines as its results."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import labinfer


class JsonChild:
    """Child process that runs a module, to which it gives a request on standard input. It is killed at the end of a ``with`` block.

    The child leads a session of its own: Ctrl-C reaches this process only, and a kill reaches the child's forks, too.

    Args:
        module: full name of a module that reads a request and writes JSON lines to standard output.
        request: the request.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, module: str, request: msgspec.Struct):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        try:
            with tempfile.TemporaryFile() as given:  # a pipe could block if the child does not read
                given.write(msgspec.json.encode(request))
                given.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    cwd=Path(labinfer.__file__).parent.parent,  # so that the process finds this package
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    start_new_session=True,
                )
        except BaseException:
            self._errors.close()
            raise

    def __enter__(self) -> JsonChild:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def lines(self, deadline: float) -> Iterator[bytes]:
        """Complete lines of the child's output as they come, until the output ends or ``deadline`` (``time.monotonic``) passes."""
        output, rest = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and poll.poll(1000 * left):
            data = os.read(output, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines

    def exit_code(self, deadline: float) -> int | None:
        """Exit code of the child, negative for a signal; None if it has not ended by ``deadline`` (``time.monotonic``)."""
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def last_error(self) -> str:
        """The last line that the child wrote to standard error; empty if it wrote none."""
        # The child shares the file position, so that a seek would make it overwrite what it has written.
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), min(size, 1 << 16), max(0, size - (1 << 16)))
        return "".join(said.decode(errors="replace").strip().splitlines()[-1:])
