"""LineEditor: reads lines that the user edits on a terminal, by prompt_toolkit. History: the user's messages in earlier chats."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.shortcuts import CompleteStyle

from labinfer.base.errors import Interrupted
from labinfer.comm.group.signals import SignalGuard

POLL_SECONDS = 0.01


class EditorEvent(Enum):
    """Event while the user edits a line."""

    LINE_ENDED = 0
    STOP_TYPED = 1


class History(FileHistory):
    """A file with the user's messages of earlier chats. If the file cannot be read or written, no history is kept."""

    @classmethod
    def open(cls, path: Path | None = None) -> History:
        """Open the history file ``path``, by default that of this user."""
        try:
            path = path or Path.home() / ".local" / "state" / "labinfer" / "chat-history"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # opening a named pipe would block
                raise OSError(f"{path} is not a file")
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            return cls(path)
        except (OSError, RuntimeError):
            return cls(os.devnull)

    def append_string(self, string: str) -> None:
        """Do nothing: prompt_toolkit calls this for every line, but a message may have several; see ``add``."""

    def add(self, message: str) -> None:
        """Add a message, unless it equals the last message in the history."""
        if self.get_strings()[-1:] != [message]:
            super().append_string(message)

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


class LineEditor:
    """Reads edited lines from the terminal on standard input and output.

    prompt_toolkit runs in a thread of its own: in the main thread, its asyncio loop would replace the signal wakeup
    descriptor of ``SignalGuard``.

    Args:
        signals: raises ``Interrupted`` when a signal arrives, but only during the wait for a line.
        commands: commands for Tab completion.
        can_stop: whether Ctrl-Z suspends the program.
    """

    def __init__(self, signals: SignalGuard, commands: Sequence[str], can_stop: bool):
        self.history = History.open()
        keys = KeyBindings()
        if can_stop:
            keys.add("c-z")(lambda event: run_in_terminal(self._stop))
        self._session: PromptSession[str] = PromptSession(
            history=self.history,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=keys,
        )
        self._signals = signals
        self._thread = ThreadPoolExecutor(1, "line editor")
        self._events: SimpleQueue[EditorEvent] = SimpleQueue()
        """Events of the line that is edited, from prompt_toolkit's thread to the main thread."""
        self._is_continued = threading.Event()

    def read(self, prompt: str) -> str:
        """Read the next line.

        Raises:
            EOFError: the input has ended.
            Interrupted: Ctrl-C was typed, or a signal arrived.
        """
        self._signals.check()
        events = self._events = SimpleQueue()
        is_running = threading.Event()
        line = self._thread.submit(self._session.prompt, prompt, handle_sigint=False, pre_run=is_running.set)
        line.add_done_callback(lambda _: events.put(EditorEvent.LINE_ENDED))
        try:
            while self._wait_for(events) is EditorEvent.STOP_TYPED:
                os.kill(0, signal.SIGTSTP)  # also stops the other processes of its pipeline
                self._is_continued.set()
            return line.result()
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        except Interrupted:
            while not is_running.wait(POLL_SECONDS) and not line.done():
                pass
            if (loop := self._session.app.loop) is not None:
                with suppress(RuntimeError):  # the line has just ended, and its loop is closed
                    loop.call_soon_threadsafe(self._end_line)
            while not line.done():
                self._is_continued.set()
                time.sleep(POLL_SECONDS)
            raise

    def _end_line(self) -> None:
        """End the current line in prompt_toolkit's loop, unless Enter has ended it already."""
        future = self._session.app.future
        if future is not None and not future.done():
            self._session.app.exit(exception=EOFError)

    def _wait_for(self, events: SimpleQueue[EditorEvent]) -> EditorEvent:
        # Only here may a signal raise: raised while `submit` starts the thread, it would leave a line that nobody ends.
        with self._signals.raising():
            return events.get()

    def _stop(self) -> None:
        """Suspend the program, as Ctrl-Z does. Returns once the program is continued.

        The main thread sends the signal, which stops it before the call returns. Another thread would run on for a while, change
        the terminal's mode again, and then lose the terminal to the shell.
        """
        self._is_continued.clear()
        self._events.put(EditorEvent.STOP_TYPED)
        self._is_continued.wait()
