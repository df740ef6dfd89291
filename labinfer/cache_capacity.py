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


def spanned_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens in a row, one at least, are in at most, wherever the first one is in its block."""
    return (num_tokens + block_size - 2) // block_size + 1


def window_blocks(window: int, block_size: int) -> int:
    """Blocks of windowed layers that a sequence holds between two steps: those of the tokens before the next one that it sees.

    Args:
        window: tokens that a token sees, itself included.
    """
    return spanned_blocks(max(1, window - 1), block_size)


def least_window_blocks(window: int, block_size: int, chunk: int, kept: int | None = None) -> int:
    """Blocks of windowed layers without which a sequence may not be able to go on.

    Args:
        chunk: tokens of a sequence in a step, at most.
        kept: tokens that a context shift keeps; None without any. A context so short that half of it is in the window keeps
            all its blocks.
    """
    between_steps = window_blocks(window, block_size)
    if kept is not None:
        between_steps = max(between_steps, -(-kept // block_size) + spanned_blocks(2 * window + block_size, block_size))
    return between_steps + -(-chunk // block_size)
