"""``AttentionHeads`` and ``QKVHeads``: a layer's heads, as the functions of attention are given them in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


class HeadNorms(NamedTuple):
    """RMS norms of each query head and each key head over its P dimensions (Henry et al. 2020, arXiv:2010.04245)."""

    q_P: torch.Tensor
    """Weight, in a dtype as in ``AddRMSNorm``."""
    k_P: torch.Tensor
    eps: float
    after_rotation: bool = False
    values: bool = False
    """Whether value heads have one as well, without a weight."""


@dataclass(frozen=True, slots=True)
class QKVHeads:
    """This rank's heads of a layer's queries, keys and values, as ``RotateAndWrite`` is given them."""

    num_kv: int
    """KV heads, K; 0 where there are queries only, and nothing is written."""
    interleaved: bool = False
    """Whether the pairs of dimensions that are rotated are (2r, 2r + 1) instead of (r, r + R/2)."""
    norms: HeadNorms | None = None
    """None where heads are not normalised."""
