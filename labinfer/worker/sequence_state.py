"""SequenceState: a worker's copy of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from labinfer.base.plan import TokenSampling


@dataclass(kw_only=True)
class SequenceState:
    """A worker's copy of a sequence, built only from the plans that it receives."""

    token_ids: list[int]
    sampling: TokenSampling
    state_slot: int
    """Slot of the sequence's recurrent state; see ``SequenceStart``."""
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    """Block table of the sliding-window layers, if they have separate blocks."""
    hidden_sum_D: torch.Tensor | None = None
    """Sum of the hidden states that were pooled so far, float32."""
    num_pooled: int = 0
