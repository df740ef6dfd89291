"""Clock: interface of a clock. Objects receive a clock in their constructor, so that a simulator or a test can replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, in seconds. Code that only reads the time accepts any ``Callable[[], float]``."""

    def __call__(self) -> float:
        """Seconds since an arbitrary moment in the past."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    __call__ = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
