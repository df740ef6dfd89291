"""``AttentionHeads`` and ``QKVHeads``: constant head arguments of a layer's attention functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """A rank's attention heads of one layer, argument of ``PagedAttention``."""

    head_ptr: torch.Tensor
    """Query heads ``head_ptr[k]:head_ptr[k + 1]`` read KV head k; int64, (K + 1), in host memory."""
    scale: float
    """Factor on the attention scores."""
    window: int = 0
    """Sliding-window size in tokens, the query's own included (Beltagy et al. 2020, arXiv:2004.05150); 0 for full attention. Blocks before
    the window of all queries are not read: their entries in ``AttentionBatch.tables_N`` may name any block."""
    sinks_H: torch.Tensor | None = None
    """Attention-sink logit of each query head, which adds to the softmax denominator (Miller 2023, "Attention is off by one", and the
    model card of gpt-oss, arXiv:2508.10925); float32."""
    cap: float = 0.0
    """Soft cap of the scaled scores, ``cap * tanh(score / cap)`` (Gemma 2, arXiv:2408.00118); 0 for no cap."""


class HeadNorms(NamedTuple):
    """RMS norms of each query head and each key head over its P dimensions (Henry et al. 2020, arXiv:2010.04245)."""

    q_P: torch.Tensor
    """Weight of the query norm; dtype as in ``AddRMSNorm``."""
    k_P: torch.Tensor
    eps: float
    after_rotation: bool = False
    values: bool = False
    """Whether value heads are normalized too, without a weight."""


@dataclass(frozen=True, slots=True)
class QKVHeads:
    """A rank's query, key and value heads of one layer, argument of ``RotateAndWrite``."""

    num_kv: int
    """KV heads, K; 0 if there are only queries and nothing is written."""
    interleaved: bool = False
    """Whether rope rotates the interleaved pairs of dimensions (2r, 2r + 1) instead of (r, r + R/2)."""
    norms: HeadNorms | None = None
    """QK norms; None if the layer has none."""
