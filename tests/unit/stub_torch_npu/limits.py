"""Limits of operators, and the pages that give them.

Pages are files of docs/zh/custom_APIs/torch_npu in Ascend/op-plugin, at commit 517f2e7d; ``aclnn`` pages are those of the operators
below them in hicann/ops-transformer. Limits are those of Atlas A2 and A3.
"""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)


class LimitError(Exception):
    """A call that a page does not allow."""


def require(allowed: object, page: str, limit: str) -> None:
    if not allowed:
        raise LimitError(f"{limit} ({page})")


def require_dtype(tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], page: str, name: str) -> None:
    require(tensor.dtype in dtypes, page, f"{name} is in {tensor.dtype}, not in one of {dtypes}")


def require_plain(tensor: torch.Tensor, page: str, name: str) -> None:
    """A contiguous tensor that is not empty."""
    require(tensor.numel(), page, f"{name} is empty")
    require(tensor.is_contiguous(), page, f"{name} is not contiguous")


def is_transposed(matrix: torch.Tensor) -> bool:
    """Whether the last two dimensions are those of a contiguous tensor, swapped."""
    return matrix.transpose(-1, -2).is_contiguous()
