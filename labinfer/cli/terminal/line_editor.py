"""LineEditor: line editing on a terminal, by prompt_toolkit. History: the user's messages in earlier chats."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.shortcuts import CompleteStyle

from labinfer.base.errors import Interrupted

POLL_SECONDS = 0.01


class History(FileHistory):
    """A file with the user's messages of earlier chats. If it cannot be read or written, no history is kept."""

    @classmethod
    def open(cls, path: Path | None = None) -> History:
        """Open the history in ``path``, by default the user's history file."""
        try:
            path = path or Path.home() / ".local" / "state" / "labinfer" / "chat-history"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # opening a FIFO would block
                raise OSError(f"{path} is not a file")
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            return cls(path)
        except (OSError, RuntimeError):
            return cls(os.devnull)

    def append_string(self, string: str) -> None:
        """Do nothing: prompt_toolkit calls this for every line, but a message may have several; see ``add``."""

    def add(self, message: str) -> None:
        """Add a message, unless it equals the last one."""
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
        commands: commands for Tab completion.
        can_stop: whether Ctrl-Z suspends the program.
    """

    def __init__(self, commands: Sequence[str], can_stop: bool):
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
        self._thread = ThreadPoolExecutor(1, "line editor")
        self._stops: SimpleQueue[threading.Event | None] = SimpleQueue()
        """Requests to the main thread: an event to set after it has suspended the program; None at the end of the line."""

    def read(self, prompt: str) -> str:
        """Read the next line.

        Raises:
            EOFError: the input has ended.
            Interrupted: Ctrl-C was typed, or a signal arrived.
        """
        stops = self._stops = SimpleQueue()
        line = self._thread.submit(self._session.prompt, prompt, handle_sigint=False)
        line.add_done_callback(lambda _: stops.put(None))
        try:
            while (is_continued := stops.get()) is not None:
                try:
                    os.kill(0, signal.SIGTSTP)  # also stops the other processes of its pipeline
                finally:
                    is_continued.set()
            return line.result()
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        except Interrupted:
            editor = self._session.app
            while not editor.is_running and not line.done():
                time.sleep(POLL_SECONDS)
            if editor.loop is not None:
                editor.loop.call_soon_threadsafe(partial(editor.exit, exception=EOFError))
            while not line.done():
                if (is_continued := stops.get()) is not None:
                    is_continued.set()
            raise

    def _stop(self) -> None:
        """Suspend the program, as Ctrl-Z does. Returns once it is continued.

        The signal is sent by the main thread, which it stops before the call returns. Another thread would continue for
        a while, change the terminal's mode again, and then lose the terminal to the shell.
        """
        is_continued = threading.Event()
        self._stops.put(is_continued)
        is_continued.wait()
