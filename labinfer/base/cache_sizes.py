"""CacheSizes: numbers of KV blocks and state slots, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Sizes of a model's caches, equal on every rank. A block holds ``CacheOptions.block_size`` tokens."""

    num_blocks: int
    """KV blocks."""
    num_host_blocks: int = 0
    """KV blocks in host memory, for sequences that are swapped out."""
    window: int = 0
    """Window size, in tokens, of sliding-window layers with separate KV blocks (window blocks); 0 without any."""
    num_window_blocks: int = 0
    """Window blocks."""
    num_host_window_blocks: int = 0
    """Window blocks in host memory, for sequences that are swapped out."""
    num_states: int = 0
    """Slots for recurrent states of sequences; 0 if no layer keeps any."""
    num_host_states: int = 0
    """Slots for states in host memory, for sequences that are swapped out."""
    max_model_len: int
    """Maximum number of tokens of a sequence in the context at once."""
