"""What a rank is doing now, so that a wait that takes too long can say who waited for whom, and in which step."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass

from labinfer.errors import WaitTimeout

WAITING_FOR_NOBODY = "waiting for nobody: look here first"


@dataclass
class Progress:
    """The present step of one rank. One object per process, handed to whoever works or waits."""

    label: str = "this rank"
    """``rank 2 (stage 1, tp 0)``."""
    timeout: float = 300.0
    """Seconds a wait may take."""
    oversubscribed: bool = False
    """More ranks than cores on this node: a waiting rank must not hold on to its core."""
    step_id: int = -1
    waiting_for: str = ""

    waiting_since: float = 0.0

    @contextmanager
    def waiting(self, what: str):
        """Not reset by an exception: after a timeout the rank is still asked what it waited for."""
        self.waiting_for, self.waiting_since = what, time.monotonic()
        yield
        self.waiting_for = ""

    @contextmanager
    def without_limit(self):
        """Waits inside may take as long as they take; a peer that dies still ends them, over the lifeline."""
        limit, self.timeout = self.timeout, math.inf
        try:
            yield
        finally:
            self.timeout = limit

    def describe(self) -> str:
        """What this rank is doing; called from another thread."""
        what, since = self.waiting_for, self.waiting_since
        doing = f"waiting {time.monotonic() - since:.1f} s for {what}" if what else WAITING_FOR_NOBODY
        return f"{self.label}: {self._step}, {doing}"

    def timed_out(self, what: str, seconds: float) -> WaitTimeout:
        return WaitTimeout(
            f"{self.label} waited {seconds:g} s ({self._step}) for {what}; raise --timeout if it only needs longer"
        )

    @property
    def _step(self) -> str:
        return f"step {self.step_id}" if self.step_id >= 0 else "before the first step"
