"""Progress: the current step and wait of a rank, so that a timeout names the rank, the step and the peer."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from labinfer.base.errors import WaitTimeout

WAITING_FOR_NOBODY = "waiting for no other rank; look here first"
NAMED_RANKS = re.compile(r"\branks? (\d+(?:-\d+|(?:, \d+)*))")
"""Pattern of ranks in a text, as written by ``name_ranks`` and by the labels of places."""


@dataclass(kw_only=True)
class Progress:
    """Current step and wait of one rank. One object per process, shared by all parts that compute or wait."""

    rank: int = 0
    """World rank of this process."""
    label: str = "this rank"
    """Name of the rank in errors: ``rank 2 (stage 1, tp 0)``."""
    timeout: float = 300.0
    """Timeout of waits in seconds."""
    oversubscribed: bool = False
    """Whether this node has more ranks than cores, so that a waiting rank must yield its core at once."""
    step_id: int = -1
    """Id of the current step; -1 before the first step."""
    waiting_for: str = ""
    """Transfer that this rank waits for; empty while it computes."""
    waiting_since: float = 0.0
    """Start of the wait (``time.monotonic``)."""
    on_wait: Callable[[bool], None] | None = None
    """Called with True when a wait begins and with False when it ends, so that other ranks can use this rank's cores meanwhile. If set,
    waits with a wake-up event sleep without yielding first."""

    @contextmanager
    def waiting(self, what: str):
        """Record a wait. An exception does not reset it, so that after a timeout the rank can still name the transfer and the peer."""
        self.waiting_for, self.waiting_since = what, time.monotonic()
        if self.on_wait is not None:
            self.on_wait(True)
        yield
        if self.on_wait is not None:
            self.on_wait(False)
        self.waiting_for = ""

    @contextmanager
    def without_limit(self):
        """Disable the timeout of waits inside the block. The health channel still ends them if a peer dies."""
        limit, self.timeout = self.timeout, math.inf
        try:
            yield
        finally:
            self.timeout = limit

    def describe(self) -> str:
        """Step and wait of this rank as a text; may be called from any thread."""
        what, since = self.waiting_for, self.waiting_since
        doing = f"waiting {time.monotonic() - since:.1f} s for {what}" if what else WAITING_FOR_NOBODY
        return f"{self.label}: {self._step}, {doing}"

    def wait(self) -> tuple[str, float] | None:
        """Ranks that this rank waits for, such as ``1-3``, and the seconds so far; None while this rank computes. May be called from any thread."""
        what, since = self.waiting_for, self.waiting_since
        peers = NAMED_RANKS.search(what)
        if not peers:
            return None
        return peers[1], time.monotonic() - since

    def timed_out(self, what: str, seconds: float) -> WaitTimeout:
        """Timeout error of a wait for ``what`` of more than ``seconds``."""
        return WaitTimeout(
            f"{self.label} waited {seconds:g} s ({self._step}) for {what}; raise --timeout if it is only slow"
        )

    @property
    def _step(self) -> str:
        return f"step {self.step_id}" if self.step_id >= 0 else "before the first step"
