"""CallLock: a lock that lets several threads call a model one at a time; a call may be a generator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from labinfer.base.errors import UserError

POLL_SECONDS = 0.5
"""Interval in seconds at which a waiting thread checks whether the thread that holds the lock has ended without releasing it."""


class CallLock:
    """A lock for calls and generators. A generator holds the lock until the generator ends, also between two items. If the caller
    abandons an unfinished generator, the next call of the caller's thread closes the generator and takes the lock. Once that thread
    has ended, the next call of any thread does so.

    Args:
        name: name of the locked object, for error messages.
        on_acquire: called by a thread when it has acquired the lock.
    """

    def __init__(self, name: str, on_acquire: Callable[[], None] = lambda: None):
        self._name, self._on_acquire = name, on_acquire
        self._lock, self._takeover = threading.Lock(), threading.Lock()
        self._holder: tuple[threading.Thread, Generator | None] | None = None

    def run(self, steps: Generator) -> Iterator[Any]:
        """Yield the items of the generator ``steps``, and hold the lock until ``steps`` ends.

        Raises:
            UserError: a later call has closed the generator before it was exhausted.
        """
        with self.turn(steps):
            yield from steps
            if self._holder is None or self._holder[1] is not steps:
                raise UserError(
                    f"a later call on this {self._name} has ended this iterator; consume it before the next call"
                )

    @contextmanager
    def turn(self, steps: Generator | None = None) -> Iterator[None]:
        """Context that holds the lock. Waits for other threads. An unfinished generator of this thread, or of a thread
        that has ended, is closed first.

        Args:
            steps: generator that holds the lock, if the call is one.

        Raises:
            UserError: called from within the generator that holds the lock.
        """
        mine = (threading.current_thread(), steps)
        self._enter(mine)
        try:
            self._on_acquire()
            yield
        finally:
            if self._holder is mine:  # if not, another thread has taken over the lock
                self._holder = None
                self._lock.release()

    def _enter(self, mine: tuple[threading.Thread, Generator | None]) -> None:
        timeout = 0.0
        while not self._lock.acquire(timeout=timeout):
            with self._takeover:  # only one waiting thread closes the generator
                if self._may_take_over():
                    self._holder = mine
                    return
            timeout = POLL_SECONDS
        self._holder = mine

    def _may_take_over(self) -> bool:
        """Close the generator that holds the lock, if it belongs to this thread or to a thread that has ended. Returns whether the
        lock can be taken over."""
        holder = self._holder
        if holder is None or (holder[0] is not threading.current_thread() and holder[0].is_alive()):
            return False
        try:
            if holder[1] is not None:
                holder[1].close()
        except ValueError:  # ``close`` of a running generator raises this: the call comes from inside it
            raise UserError(f"this {self._name} cannot be called from within its own callback") from None
        return True
