"""What a rank is doing now, so that a wait that takes too long can say who waited for whom, and in which step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

from labinfer.errors import WaitTimeout


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

    @contextmanager
    def waiting(self, what: str):
        self.waiting_for = what
        yield
        self.waiting_for = ""

    def timed_out(self, what: str, seconds: float) -> WaitTimeout:
        step = f"in step {self.step_id}" if self.step_id >= 0 else "before the first step"
        return WaitTimeout(
            f"{self.label} waited {seconds:g} s {step} for {what}; that rank is stuck or overloaded (raise --timeout if it only needs longer)"
        )
