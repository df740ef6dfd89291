"""``AttentionHeads``: what attention needs to know of a layer's heads, the same in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """This rank's heads of a layer, as ``PagedAttention`` is given them."""

    head_ptr: torch.Tensor
    """KV head k is read by query heads ``head_ptr[k]:head_ptr[k + 1]``; int64, (K + 1), in host memory."""
    scale: float
    """Factor on the scores."""
    window: int = 0
    """Tokens that a query sees, itself included (Beltagy et al. 2020, arXiv:2004.05150); 0 for all. Blocks of which no query of the
    sequence sees a token are not read: their places in ``AttentionBatch.tables_N`` may name any block."""
    sinks_H: torch.Tensor | None = None
    """Logit of each query head that counts in the softmax without a value (Miller 2023, "Attention is off by one", and the model card of
    gpt-oss, arXiv:2508.10925); float32."""
