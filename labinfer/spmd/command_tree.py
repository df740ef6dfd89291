"""CommandTree: the way of commands from rank 0 to all ranks that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DIRECT = 32
"""Followers that rank 0 sends commands to by itself. A send takes it some 20 us: those to so many take as long as scheduling a
micro-batch of 16 sequences, and it can do nothing else meanwhile."""
FAN_OUT = 8
"""Ranks that each one sends to above that: the others of rank 0's stage on a machine of eight devices. 512 ranks have a command
after three sends in a row."""


@dataclass(frozen=True)
class CommandTree:
    """Who sends commands to whom: rank 0 to all others while they are few, otherwise each rank to some of those behind it.

    A rank forwards a command before it runs it, but looks for the next one only when it has run the one before. Whom it
    forwards to stands in its own stage or a later one, and so needs the command later than itself: nobody waits for a
    forwarder that works.
    """

    ranks: Sequence[int]
    """Rank 0, then the others in order of their stages; see ``Topology.command_order``."""
    max_direct: int = MAX_DIRECT
    fan_out: int = FAN_OUT

    def sender(self, rank: int) -> int:
        """The rank that sends commands to this one; rank 0 for itself."""
        return self.ranks[max(0, self.ranks.index(rank) - 1) // self._width]

    def receivers(self, rank: int) -> Sequence[int]:
        """The ranks that this one sends commands to, in this order."""
        begin = self.ranks.index(rank) * self._width + 1
        return self.ranks[begin : begin + self._width]

    @property
    def _width(self) -> int:
        num_followers = len(self.ranks) - 1
        return self.fan_out if num_followers > self.max_direct else max(1, num_followers)
