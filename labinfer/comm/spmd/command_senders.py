"""command_senders: the way of commands from rank 0 to all ranks that run them."""

from __future__ import annotations

from collections.abc import Sequence

MAX_DIRECT = 32
"""Followers that rank 0 sends commands to by itself. A send takes it some 20 us: those to so many take as long as scheduling a
micro-batch of 16 sequences, and it can do nothing else meanwhile."""
FAN_OUT = 8
"""Ranks that each one sends to above that: the others of rank 0's stage on a machine of eight devices. 512 ranks have a command
after three sends in a row."""


def command_senders(ranks: Sequence[int], max_direct: int = MAX_DIRECT, fan_out: int = FAN_OUT) -> dict[int, int]:
    """The rank that sends commands to each follower: rank 0 to all while they are few, otherwise each rank to some of those behind it.

    A rank forwards a command before it runs it, but looks for the next one only when it has run the one before. Whom it
    forwards to stands in its own stage or a later one, and so needs the command later than itself: nobody waits for a
    forwarder that works.

    Args:
        ranks: rank 0, then the followers in order of their stages; see ``Topology.command_order``.
    """
    width = fan_out if len(ranks) - 1 > max_direct else len(ranks)
    return {rank: ranks[number // width] for number, rank in enumerate(ranks[1:])}
