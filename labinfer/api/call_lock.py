"""CallLock: threads that use one thing after another."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from labinfer.base.errors import UserError

LOOK_SECONDS = 0.5
"""Between two looks at whether the thread whose turn it is has ended without giving it back."""


class CallLock:
    """A lock whose holder may be a generator that nobody takes to its end.

    Args:
        name: the thing, for errors.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock, self._takeover = threading.Lock(), threading.Lock()
        self._holder: tuple[threading.Thread, Generator | None] | None = None

    def run(self, steps: Generator) -> Iterator[Any]:
        """Yield from a generator while it is this thread's turn.

        Raises:
            UserError: a later call has ended the generator before it was taken to its end.
        """
        with self.turn(steps):
            yield from steps
            if self._holder is None or self._holder[1] is not steps:
                raise UserError(f"a later call of this {self._name} has ended this iterator; take all of it first")

    @contextmanager
    def turn(self, steps: Generator | None = None) -> Iterator[None]:
        """Wait for the threads that came before. A generator that this thread, or one that has ended, left unfinished is
        closed.

        Args:
            steps: generator that the turn is for.

        Raises:
            UserError: called from within the generator whose turn it is.
        """
        mine = (threading.current_thread(), steps)
        self._enter(mine)
        try:
            yield
        finally:
            if self._holder is mine:  # else somebody has taken over, with the lock
                self._holder = None
                self._lock.release()

    def _enter(self, mine: tuple[threading.Thread, Generator | None]) -> None:
        timeout = 0.0
        while not self._lock.acquire(timeout=timeout):
            with self._takeover:  # by one thread only
                if self._may_take_over():
                    self._holder = mine
                    return
            timeout = LOOK_SECONDS
        self._holder = mine

    def _may_take_over(self) -> bool:
        """Close what this thread, or one that has ended, left unfinished, if the turn is such a one's."""
        holder = self._holder
        if holder is None or (holder[0] is not threading.current_thread() and holder[0].is_alive()):
            return False
        try:
            if holder[1] is not None:
                holder[1].close()
        except ValueError:  # it is running: this call comes from a function that it called
            raise UserError(f"this {self._name} is at work on the call that called this one") from None
        return True
