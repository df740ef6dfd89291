"""Somebody who sits at a terminal: starts a program there, types, and reads the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launchers import ROOT, environment, kill_tree

ROWS, COLUMNS = 50, 300
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07")
SPACE = "\b\x1b[2C"
"""How prompt_toolkit writes the space behind a prompt."""
CTRL_C, CTRL_D, CTRL_Z, ENTER = "\x03", "\x04", "\x1a", "\r"
UP, LEFT = "\x1b[A", "\x1b[D"


class PseudoTerminal:
    """The far end of a terminal on which a program runs in the foreground."""

    def __init__(self, process: subprocess.Popen, fd: int):
        self.process, self._fd = process, fd
        self._raw = b""
        self._begin = 0
        self._last = time.monotonic()
        self.pieces: list[tuple[float, str]] = []
        """All that has come, piece by piece, each with the seconds of silence before it."""

    @property
    def text(self) -> str:
        """All that was on the screen, without what only moves the cursor or sets colours."""
        return (
            ESCAPES.sub("", self._raw.decode(errors="replace").replace(SPACE, " "))
            .replace("\r\n", "\n")
            .replace("\r", "")
        )

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """What has come since the last call, up to this text and with it."""
        deadline = time.monotonic() + seconds
        while (found := self.text.find(text, self._begin)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {seconds:g} s:\n{self.text}"
            if select.select([self._fd], [], [], left)[0] and not self._read():
                raise AssertionError(f"it ended before {text!r}:\n{self.text}")
        begin, self._begin = self._begin, found + len(text)
        return self.text[begin : self._begin]

    def say(self, message: str, end: str = "\n> ") -> str:
        """Type a line, and read up to the next prompt; returns what came after the line itself."""
        self.type(message + ENTER)
        self.wait_for(message.splitlines()[-1])
        self.wait_for("\n")  # behind the line as it is drawn last
        self._begin -= 1
        return self.wait_for(end).removesuffix(end).strip()

    def wait(self, seconds: float = 30.0) -> int:
        """The exit status."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still there after {seconds:g} s:\n{self.text}"
            if select.select([self._fd], [], [], 0.05)[0]:
                self._read()
        return self.process.returncode

    def settings(self) -> list:
        """How the terminal is set; see ``termios.tcgetattr``."""
        return termios.tcgetattr(self._fd)

    def wait_for_settings(self, expected: list, seconds: float = 10.0) -> None:
        """Wait until the terminal is set like this."""
        deadline = time.monotonic() + seconds
        while self.settings() != expected:
            assert time.monotonic() < deadline, f"{self.settings()} after {seconds:g} s, not {expected}"
            time.sleep(0.05)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: nobody has the other end open any more
            data = b""
        self._raw += data
        silence, self._last = time.monotonic() - self._last, time.monotonic()
        self.pieces.append((silence, data.decode(errors="replace")))
        return bool(data)


@contextmanager
def pseudo_terminal(command: list[str], home: Path, columns: int = COLUMNS, **env: str) -> Iterator[PseudoTerminal]:
    """A program on a terminal of its own, for a user with this home; afterwards nothing of it is left."""
    if not (home / ".cache").is_symlink():
        (home / ".cache").symlink_to(Path.home() / ".cache")  # compiled functions are there
    far, near = pty.openpty()
    fcntl.ioctl(near, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(HOME=str(home), TERM="xterm", LANG="C.UTF-8", PROMPT_TOOLKIT_NO_CPR="1", **env),
        stdin=near,
        stdout=near,
        stderr=near,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    terminal = PseudoTerminal(process, far)
    try:
        yield terminal
    finally:
        kill_tree(process)
        process.wait()
        os.close(near)
        os.close(far)
