"""Clock: the one source of time that is handed to whoever needs it, so that a simulator or a test can put in its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back. Whoever only reads them may be handed any ``Callable[[], float]``."""

    def __call__(self) -> float:
        """Seconds since some moment in the past."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when these seconds have passed."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    __call__ = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
