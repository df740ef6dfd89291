"""CacheSizes: numbers of KV blocks and recurrent-state slots of a model, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Numbers of a model's KV blocks and recurrent-state slots, equal on every rank. A block holds
    ``CacheOptions.block_size`` tokens."""

    num_blocks: int
    """KV blocks in device memory."""
    num_host_blocks: int = 0
    """KV blocks in host memory, for sequences that are swapped out."""
    window: int = 0
    """Window size in tokens, if sliding-window layers have KV blocks of their own (window blocks); 0 if they do not."""
    num_window_blocks: int = 0
    """Window blocks in device memory."""
    num_host_window_blocks: int = 0
    """Window blocks in host memory, for sequences that are swapped out."""
    num_states: int = 0
    """Slots for recurrent states, one per sequence; 0 if no layer has such a state."""
    num_host_states: int = 0
    """Slots for recurrent states in host memory, for sequences that are swapped out."""
    max_model_len: int
    """Maximum context length of a sequence, in tokens."""
