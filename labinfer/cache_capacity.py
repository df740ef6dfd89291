"""Capacity of a rank's cache: how many KV blocks and slots for states so many bytes hold. Ranks and simulations count alike."""

from __future__ import annotations

STATES_EACH = 2
"""Slots for each sequence that may run at once: its own, and one for snapshots that are shared."""
STATE_FRACTION = 0.5
"""Part of the cache's memory that states may take at most."""


def blocks_that_fit(room: int, bytes_per_block: int, useful: int) -> int:
    """Blocks for a rank whose weights are loaded.

    Args:
        room: bytes that it may use for them.
        useful: more than this many can never be filled.
    """
    return min(useful, room // max(1, bytes_per_block))


def states_that_fit(room: int, bytes_per_state: int, max_num_seqs: int, each: int = STATES_EACH) -> int:
    """Slots for states in so many bytes, which KV blocks share; as many as are useful where a state takes nothing."""
    useful = each * max_num_seqs
    return min(useful, int(room * STATE_FRACTION) // bytes_per_state) if bytes_per_state else useful
