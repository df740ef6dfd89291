"""Terminal: reads messages from standard input (typed or piped), and writes text to standard output."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from labinfer.base.errors import Interrupted, UserError
from labinfer.base.standard_error import write_lines
from labinfer.cli.terminal.launchers_terminal import CTRL_C, LONGEST_LINE, LaunchersTerminal
from labinfer.cli.terminal.line_reader import LineReader
from labinfer.comm.group.signals import SignalGuard

if TYPE_CHECKING:
    from labinfer.cli.terminal.line_editor import LineEditor

PROMPT, PROMPT_FOR_MORE = "> ", ". "
BLOCK = '"' * 3
STANDARD_INPUT, STANDARD_OUTPUT = 0, 1
VISIBLE = dict.fromkeys(range(128, 160), "\N{REPLACEMENT CHARACTER}") | {
    code: f"^{chr(code ^ 64)}" for code in (*range(32), 127) if chr(code) not in "\n\t"
}
"""Replacements that make control characters visible, as a terminal echoes them: text of a model must not control the terminal."""


def read_message(read_line: Callable[[bool], str]) -> str:
    r"""Read one message of one or more lines: a line that ends with ``\`` continues in the next line, and lines after three quotes
    (``BLOCK``) continue until three quotes end a line.

    Args:
        read_line: returns the next line, given whether it is the first of a message. Raises ``EOFError`` at the end.

    Raises:
        EOFError: there is no further message.
    """
    line = read_line(True)
    if line.lstrip().startswith(BLOCK):
        return _read_block(line.lstrip()[len(BLOCK) :], read_line)
    lines = [line]
    try:
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(False))
    except EOFError:
        pass
    return "\n".join(lines)


def _read_block(line: str, read_line: Callable[[bool], str]) -> str:
    lines = [line]
    try:
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(read_line(False))
        lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
    except EOFError:
        pass
    return "\n".join(lines).strip("\n")


class Terminal:
    """Standard input and output of a chat: a terminal with prompt and history; or plain lines, if input or output is a pipe or a
    file.

    Args:
        signals: raises ``Interrupted`` when a signal arrives while the terminal waits for a message.
        commands: commands for Tab completion.
        launchers: the launcher's terminal, on which Ctrl-C is made a character; None if there is none.
    """

    def __init__(self, signals: SignalGuard, commands: Sequence[str] = (), launchers: LaunchersTerminal | None = None):
        self._signals, self._launchers = signals, launchers
        # If standard input was closed, its descriptor may by now belong to another file.
        source = STANDARD_INPUT if sys.stdin is not None else os.open(os.devnull, os.O_RDONLY)
        self._lines = LineReader(source, knows_ctrl_c=launchers is not None)
        is_terminal = os.isatty(STANDARD_INPUT) and os.isatty(STANDARD_OUTPUT)
        self.is_interactive = is_terminal or launchers is not None
        """Whether standard input and output are a terminal, directly or through the launcher."""
        self._is_line_open = False
        self._editor: LineEditor | None = None
        if is_terminal:
            from labinfer.cli.terminal.line_editor import LineEditor  # prompt_toolkit is slow to import

            self._editor = LineEditor(signals, commands, can_stop=launchers is None)

    def check(self) -> None:
        """Check whether the user or a signal interrupts an answer.

        Raises:
            Interrupted: a signal or Ctrl-C arrived.
        """
        self._signals.check()
        if self._launchers is not None and self._lines.take_ctrl_c():
            raise Interrupted(signal.SIGINT)

    def read(self) -> str:
        """Read the next message.

        Raises:
            EOFError: the input has ended.
            Interrupted: a signal arrived.
        """
        text = read_message(self._read_line)
        if self._editor is not None and text.strip():
            self._editor.history.add(text)
        return text

    def write(self, text: str) -> None:
        """Write a piece of an answer.

        Raises:
            Interrupted: the reader of standard output has closed it (other programs get SIGPIPE then).
            UserError: standard output cannot be written.
        """
        if text:
            self._is_line_open = not text.endswith("\n")
            _write(STANDARD_OUTPUT, text.translate(VISIBLE) if self.is_interactive else text)

    def end_line(self) -> None:
        """Write a line feed if the last written line has none, so that further text starts on a new line."""
        if self._is_line_open:
            self.write("\n")

    def say(self, text: str) -> None:
        """Write a line that comes from the program rather than from the model."""
        self.end_line()
        line = text.translate(VISIBLE)
        if self.is_interactive:
            _write(STANDARD_OUTPUT, line + "\n")
        else:
            write_lines(line)

    def _read_line(self, is_first: bool) -> str:
        prompt = PROMPT if is_first else PROMPT_FOR_MORE
        if self._editor is not None and not self._lines.has_line:
            line = self._editor.read(prompt)
        else:
            _write(STANDARD_OUTPUT, prompt if self.is_interactive else "")
            with self._signals.raising():
                line = self._lines.read()
            if self._launchers is not None and len(line.encode()) >= LONGEST_LINE:
                self.say(
                    f"labinfer: error: a line is limited to {LONGEST_LINE - 1} bytes; end it with \\ to continue on the next"
                )
                return self._read_line(is_first)
        if self._launchers is not None and CTRL_C in line:
            raise Interrupted(signal.SIGINT)
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _write(fd: int, text: str) -> None:
    view = memoryview(text.encode("utf-8", "replace"))
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        raise Interrupted(signal.SIGPIPE) from None
    except OSError as error:
        raise UserError(f"cannot write the reply: {error.strerror}") from None
