"""SequenceState: a sequence as a worker knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from labinfer.base.plan import TokenSampling


@dataclass(kw_only=True)
class SequenceState:
    """Sequence as a worker knows it: all of it follows from the plans."""

    token_ids: list[int]
    sampling: TokenSampling
    state_slot: int
    """See ``SequenceStart``."""
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    """Blocks of windowed layers, where these have their own."""
    hidden_sum_D: torch.Tensor | None = None
    """Sum of its rows that were pooled so far, float32."""
    num_pooled: int = 0
