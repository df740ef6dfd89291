"""Progress: the step a rank is in and what it waits for, so that a timeout names both ends of the wait and the step."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from labinfer.base.errors import WaitTimeout

WAITING_FOR_NOBODY = "waiting for nobody: look here first"
NAMED_RANKS = re.compile(r"\branks? (\d+(?:-\d+|(?:, \d+)*))")
"""The ranks that a text names as ``name_ranks`` and the labels of places do."""


@dataclass(kw_only=True)
class Progress:
    """The present step and wait of one rank. A process has one, which everything that works or waits is given."""

    rank: int = 0
    """Number in the world."""
    label: str = "this rank"
    """The rank's name in errors: ``rank 2 (stage 1, tp 0)``."""
    timeout: float = 300.0
    """Seconds that a wait may take."""
    oversubscribed: bool = False
    """More ranks than cores on this node: a waiting rank must not hold on to its core."""
    step_id: int = -1
    """Id of the step that runs; -1 before the first."""
    waiting_for: str = ""
    """Transfer that this rank waits for; empty while it works."""
    waiting_since: float = 0.0
    """Seconds of ``time.monotonic`` at which the wait began."""
    on_wait: Callable[[bool], None] | None = None
    """Called with True when a wait begins and with False when it ends, so that others can use this rank's cores meanwhile. A wait that
    can be woken sleeps at once then."""

    @contextmanager
    def waiting(self, what: str):
        """Record a wait. An exception does not reset it: after a timeout the rank is still asked what it waited for."""
        self.waiting_for, self.waiting_since = what, time.monotonic()
        if self.on_wait is not None:
            self.on_wait(True)
        yield
        if self.on_wait is not None:
            self.on_wait(False)
        self.waiting_for = ""

    @contextmanager
    def without_limit(self):
        """Lift the time limit of waits inside; a peer that dies still ends them, over the health channel."""
        limit, self.timeout = self.timeout, math.inf
        try:
            yield
        finally:
            self.timeout = limit

    def describe(self) -> str:
        """Step and wait of this rank in words; may be called from any thread."""
        what, since = self.waiting_for, self.waiting_since
        doing = f"waiting {time.monotonic() - since:.1f} s for {what}" if what else WAITING_FOR_NOBODY
        return f"{self.label}: {self._step}, {doing}"

    def wait(self) -> tuple[str, float] | None:
        """Ranks that this rank waits for, such as ``1-3``, and the seconds so far; None while it works. May be called from any thread."""
        what, since = self.waiting_for, self.waiting_since
        peers = NAMED_RANKS.search(what)
        if not peers:
            return None
        return peers[1], time.monotonic() - since

    def timed_out(self, what: str, seconds: float) -> WaitTimeout:
        """The error of a wait for ``what`` that took longer than ``seconds``."""
        return WaitTimeout(
            f"{self.label} waited {seconds:g} s ({self._step}) for {what}; raise --timeout if it only needs longer"
        )

    @property
    def _step(self) -> str:
        return f"step {self.step_id}" if self.step_id >= 0 else "before the first step"
