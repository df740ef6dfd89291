"""``HeadNorms``: norms of queries, keys and values, head by head."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadNorms(NamedTuple):
    """RMS norms of each query head and each key head over its P dimensions (Henry et al. 2020, arXiv:2010.04245)."""

    q_P: torch.Tensor
    k_P: torch.Tensor
    eps: float
    after_rotation: bool = False
    values: bool = False
    """Whether value heads have one as well, without a weight."""
