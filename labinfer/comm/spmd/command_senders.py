"""command_senders: the tree over which commands go from rank 0 to all placed ranks."""

from __future__ import annotations

from collections.abc import Sequence

MAX_DIRECT = 32
"""Maximum number of followers that rank 0 sends commands to directly. A send takes about 20 us, so this many sends take as long as
scheduling a micro-batch of 16 sequences, and rank 0 can do nothing else meanwhile."""
FAN_OUT = 8
"""Number of ranks to which each rank forwards commands if there are more than ``MAX_DIRECT`` followers: the ranks of
one stage on a machine of eight devices. A command reaches 512 ranks after three sends in a row."""


def command_senders(ranks: Sequence[int], max_direct: int = MAX_DIRECT, fan_out: int = FAN_OUT) -> dict[int, int]:
    """Follower → rank that sends it the commands: rank 0 for up to ``max_direct`` followers, otherwise a tree of degree ``fan_out``.

    A rank forwards a command before it runs it, but receives the next command only after it has run this one. Receivers are in the
    sender's stage or a later one and so need the command later than the sender: no rank waits for a busy forwarder.

    Args:
        ranks: rank 0, then the followers in stage order; see ``Topology.command_order``.
    """
    width = fan_out if len(ranks) - 1 > max_direct else len(ranks)
    return {rank: ranks[number // width] for number, rank in enumerate(ranks[1:])}
