"""CacheSizes: KV blocks and slots for states, one number for all ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Sizes of the caches of a model, the same on every rank. Tokens of a block are ``CacheOptions.block_size``."""

    num_blocks: int
    """KV blocks."""
    num_host_blocks: int = 0
    """KV blocks in host memory, for sequences that are swapped out."""
    window: int = 0
    """Tokens that a token sees at most in layers with a window, where these have KV blocks of their own; 0 where they have none."""
    num_window_blocks: int = 0
    """KV blocks of those layers."""
    num_host_window_blocks: int = 0
    """KV blocks of those layers in host memory."""
    num_states: int = 0
    """Slots for states of sequences; 0 where no layer keeps any."""
    num_host_states: int = 0
    """Slots for states in host memory, of sequences that are swapped out."""
    max_model_len: int
    """Tokens of a sequence that may be in the context at once."""
