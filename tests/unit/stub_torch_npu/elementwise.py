"""Norms, SwiGLU and rotary embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stub_torch_npu.limits import FLOATS, require, require_dtype, require_plain


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-06):
    page = "torch_npu-npu_add_rms_norm.md"
    for name, x in (("x1", x1), ("x2", x2), ("gamma", gamma)):
        require(x.numel(), page, f"{name} is empty")
        require_dtype(x, FLOATS, page, name)
        require(1 <= x.dim() <= 8, page, f"{name} has {x.dim()} dimensions")
    require(x1.dtype == gamma.dtype, page, "gamma has x1's dtype")
    require(x1.shape == x2.shape and x1.shape[-gamma.dim() :] == gamma.shape, page, "gamma has x1's last dimensions")
    x = x1 + x2
    return *_norm(x, gamma, epsilon), x


def npu_rms_norm(x, gamma, epsilon=1e-06):
    page = "（beta）torch_npu-npu_rms_norm.md"
    pairs = [(a, b) for a in FLOATS for b in {a, torch.float32}]
    require((x.dtype, gamma.dtype) in pairs, page, f"{x.dtype} with gamma in {gamma.dtype}")
    require(2 <= x.dim() <= 8 and x.shape[-gamma.dim() :] == gamma.shape, page, "gamma has x's last dimensions")
    return _norm(x, gamma, epsilon)


def npu_swiglu(x, dim=-1):
    page = "（beta）torch_npu-npu_swiglu.md"
    require_plain(x, page, "input")
    require_dtype(x, FLOATS, page, "input")
    require(x.shape[dim] % 2 == 0 and 1 <= x.dim() <= 8, page, "halves of one dimension")
    gate, up = x.chunk(2, dim=dim)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def npu_rotary_mul(x, r1, r2, rotary_mode="half", rotate=None):
    """The page also gives a range of -1 … 1 for ``r1`` and ``r2``, which rotary tables with an attention factor exceed."""
    page = "torch_npu-npu_rotary_mul.md"
    require(rotary_mode in ("half", "interleave") and rotate is None, page, rotary_mode)
    require(x.dim() == 3, page, "the layout TND")  # of the others nothing is used
    for name, tensor in (("input", x), ("r1", r1), ("r2", r2)):
        require_dtype(tensor, FLOATS, page, name)
        require_plain(tensor, page, name)
    tokens, heads, size = x.shape
    require(size < 896 and size % 2 == 0, page, f"D {size}")
    require(heads < 1000, page, f"N {heads}")
    require(r1.shape == r2.shape == (tokens, 1, size), page, "r1 and r2 are T1D")
    if rotary_mode == "half":
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x.float() * r1.float() + turned.float() * r2.float()).to(x.dtype)
