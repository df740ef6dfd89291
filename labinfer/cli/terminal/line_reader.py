"""LineReader: reads standard input line by line; a Ctrl-C character may end a line, too."""

from __future__ import annotations

import os
import select

from labinfer.cli.terminal.launchers_terminal import CTRL_C

CHUNK = 1 << 16
ENDS = (b"\n", CTRL_C.encode())


class LineReader:
    """Reads lines from a file descriptor, without the buffer of a file object, which would make ``has_line`` wrong.

    Args:
        knows_ctrl_c: whether the character Ctrl-C ends a line, as a line feed does.
    """

    def __init__(self, fd: int, knows_ctrl_c: bool):
        self._fd, self._ends = fd, ENDS if knows_ctrl_c else ENDS[:1]
        self._data = b""
        self._is_at_end = False

    @property
    def has_line(self) -> bool:
        """Whether ``read`` would return at once."""
        return self._is_at_end or self._end >= 0

    def read(self) -> str:
        """Read the next line, without its line feed. If Ctrl-C has ended the line, returns only ``CTRL_C``.

        Raises:
            EOFError: the input has ended.
        """
        while not self.has_line:
            self._read()
        if not self._data:
            raise EOFError
        end = self._end if self._end >= 0 else len(self._data)
        line, ending, self._data = self._data[:end], self._data[end : end + 1], self._data[end + 1 :]
        if ending == ENDS[1]:
            return CTRL_C
        return line.removesuffix(b"\r").decode("utf-8", "replace")

    def take_ctrl_c(self) -> bool:
        """Whether a Ctrl-C character has arrived. If so, drops all input up to the last Ctrl-C."""
        while not self._is_at_end and select.select([self._fd], [], [], 0)[0]:
            self._read()
        _, ending, after = self._data.rpartition(ENDS[1])
        if ending:
            self._data = after
        return bool(ending)

    @property
    def _end(self) -> int:
        return min((place for end in self._ends if (place := self._data.find(end)) >= 0), default=-1)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except OSError:  # the terminal does not exist any more
            data = b""
        self._data += data
        self._is_at_end = not data
