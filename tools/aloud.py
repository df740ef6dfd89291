"""Run a command so that whoever waits for it sees that it goes on.

    python tools/aloud.py COMMAND…

On a terminal, a line counts the seconds while the command says nothing. What pip says of each package that is there already is
left out. The exit status is the command's.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

QUIET_SECONDS = 1.0
"""Silence after which, and then how often, the seconds are shown."""
TERMINAL, LEFT_OUT = 1, b"Requirement already satisfied"
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
CLEAR = b"\r\x1b[K"


def run(command: list[str]) -> int:
    """Run the command to its end; returns its exit status."""
    on_terminal = os.isatty(TERMINAL)
    source, sink = pty.openpty() if on_terminal else os.pipe()
    if on_terminal:
        fcntl.ioctl(sink, termios.TIOCSWINSZ, fcntl.ioctl(TERMINAL, termios.TIOCGWINSZ, bytes(8)))
    process = subprocess.Popen(command, stdout=sink, stderr=sink if on_terminal else None)
    os.close(sink)
    try:
        copy(source, shows_time=on_terminal)
        status = process.wait()
        return status if status >= 0 else 128 - status
    except KeyboardInterrupt:  # the command has it too, and ends; nobody reads any more
        os.close(source)
        process.wait()
        return 130


def copy(source: int, shows_time: bool) -> None:
    """Write to standard output what comes, to its end."""
    begin, waits, ends_line, partial = time.monotonic(), False, True, b""
    while True:
        if shows_time and ends_line and not select.select([source], [], [], QUIET_SECONDS)[0]:
            write(CLEAR + b"... %d s" % (time.monotonic() - begin))
            waits = True
            continue
        try:
            data = os.read(source, 1 << 16)
        except OSError:  # Linux: nobody has the terminal's other end open any more
            data = b""
        if waits:
            write(CLEAR)
            waits = False
        if not data:
            write(partial)
            return
        text = re.sub(rb"(?m)^%s.*\n" % LEFT_OUT, b"", partial + data)
        begin_of_last = text.rfind(b"\n") + 1
        last = text[begin_of_last:]
        partial = last if last and last.startswith(LEFT_OUT[: len(last)]) else b""
        text = text.removesuffix(partial)
        write(text)
        if visible := ESCAPES.sub(b"", text):
            ends_line = visible.endswith(b"\n")


def write(data: bytes) -> None:
    while data:
        data = data[os.write(TERMINAL, data) :]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
