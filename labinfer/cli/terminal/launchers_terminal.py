"""LaunchersTerminal: the terminal of the launcher (mpirun, torchrun) that is between the user and rank 0."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CTRL_C = "\x03"
MPI_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
STANDARD_INPUT, STANDARD_OUTPUT = 0, 1
INPUT_FLAGS, CONTROL_CHARACTERS = 0, 6
"""Indices of the input flags and the control characters in the attributes of Python's ``termios``."""
IUTF8 = 0o40000
"""Linux' input flag with which the erase key removes a whole multi-byte character (termios(3))."""
LONGEST_LINE = 4095
"""Maximum bytes of a line: a terminal in canonical mode drops further bytes (termios(3), "Canonical mode")."""
DISABLED = b"\0"
"""Value that disables a control character of a terminal (Linux' ``_POSIX_VDISABLE``)."""


class LaunchersTerminal:
    """A terminal on which Ctrl-C can be made a character that ends a line, instead of a signal.

    As a signal, Ctrl-C would also reach the launcher: torchrun then ends all ranks, and MPICH's mpirun ends them at the second
    Ctrl-C. As a character, Ctrl-C reaches rank 0 with the typed text, also through mpirun's pipe (termios(3): VINTR and VEOL).
    Ctrl-Z also becomes a character: as a signal it would stop only the launcher, and rank 0 would read the text that the user types
    for the shell.

    Args:
        fd: file descriptor open on the terminal.

    Raises:
        OSError: the terminal has no name, as in some containers.
    """

    def __init__(self, fd: int):
        self._fd, self._path = fd, os.ttyname(fd)

    @classmethod
    def find(cls) -> LaunchersTerminal | None:
        """The terminal of this rank's launcher. None if the launcher has no terminal, or if the launcher runs on another
        machine."""
        if shutil.which("stty") is None:
            return None
        fds: list[int] = []
        try:
            if os.isatty(STANDARD_INPUT) and os.isatty(STANDARD_OUTPUT):  # torchrun's ranks inherit the terminal
                return cls(STANDARD_INPUT)
            if launcher := _mpi_launcher():
                for fd in (STANDARD_OUTPUT, STANDARD_INPUT):
                    fds.append(os.open(f"/proc/{launcher}/fd/{fd}", os.O_RDWR | os.O_NOCTTY))
                if all(map(os.isatty, fds)):
                    return cls(fds.pop())
        except OSError:  # not a terminal, or that of another user, or a terminal without a name
            pass
        finally:
            for fd in fds:
                os.close(fd)
        return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which the terminal passes Ctrl-C to this program as a character, instead of sending SIGINT to all ranks.

        At the end of the context the terminal's settings are restored. If this process dies within the context (a launcher may kill
        it when another rank fails), a separate process restores the settings.
        """
        before = termios.tcgetattr(self._fd)
        saved = subprocess.run(
            ["stty", "-g"], stdin=self._fd, capture_output=True, text=True, check=True
        ).stdout.strip()
        command = ["sh", "-c", 'read -r told || stty "$0" < "$1"', saved, self._path]
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        attributes = termios.tcgetattr(self._fd)
        attributes[CONTROL_CHARACTERS][termios.VINTR] = attributes[CONTROL_CHARACTERS][termios.VSUSP] = DISABLED
        attributes[CONTROL_CHARACTERS][termios.VEOL] = CTRL_C.encode()
        attributes[INPUT_FLAGS] |= IUTF8
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # under mpirun, this process is in the background
        try:
            termios.tcsetattr(self._fd, termios.TCSANOW, attributes)
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSANOW, before)
            keeper.communicate(b"it is as before\n")


def _mpi_launcher() -> int | None:
    """Process id of the nearest mpirun above this process (Linux, proc(5))."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        name, _, fields = stat.partition("(")[2].rpartition(")")
        if name.startswith(MPI_LAUNCHERS):
            return pid
        pid = int(fields.split()[1])
    return None
