"""Norms, gated activations and rope in Triton (Tillet et al. 2019, MAPL), one fused kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labinfer.functions.attention_batch import Angles
from labinfer.functions.attention_heads import QKVHeads
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference import elementwise
from labinfer.functions.reference.attention import write_kv

COLUMNS = 1024
"""Columns of a row that one Triton program of an activation computes."""
NO_NORM, NORM_BEFORE, NORM_AFTER = range(3)
"""Position of the QK norms relative to rope."""


def add_rms_norm(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden + delta`` and its RMSNorm; see ``AddRMSNorm``."""
    if not (hidden_TD.dim() == 2 and hidden_TD.is_contiguous()):
        return elementwise.add_rms_norm(hidden_TD, delta_TD, weight_D, eps)
    rows, size = hidden_TD.shape
    normed_TD = torch.empty_like(hidden_TD)
    sum_TD = hidden_TD if delta_TD is None else torch.empty_like(hidden_TD)
    if rows:
        _add_rms_norm[(rows,)](
            hidden_TD,
            hidden_TD if delta_TD is None else delta_TD.contiguous(),
            weight_D,
            sum_TD,
            normed_TD,
            size,
            eps,
            HAS_DELTA=delta_TD is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=4 if size <= 2048 else 8,
        )
    return sum_TD, normed_TD


def silu_and_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; gate and up are the halves of a row: (T, 2F) → (T, F)."""
    return _activate(gate_up_TF, is_gelu=False)


def gelu_and_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``, gate and up are the halves of a row, with the tanh approximation of GELU: (T, 2F) → (T, F)."""
    return _activate(gate_up_TF, is_gelu=True)


def rotate_and_write(
    qkv_THP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, angles: Angles | None, heads: QKVHeads
) -> torch.Tensor:
    """Apply rope and QK norms to queries and keys, and write keys and values to the KV cache; see ``RotateAndWrite``."""
    qkv_THP = qkv_THP.contiguous()
    rows, num_heads, size = qkv_THP.shape
    num_kv, norms = heads.num_kv, heads.norms
    num_queries = num_heads - 2 * num_kv
    q_THP = qkv_THP.new_empty(rows, num_queries, size)
    if not rows:
        return q_THP
    in_rows = num_kv > 0 and not cache.is_tiled and cache.k_scale is None
    k = v = q_THP  # without new keys, nothing is written
    if in_rows:
        k, v = cache.k, cache.v
    elif num_kv:
        k, v = (qkv_THP.new_empty(rows, num_kv, size) for _ in range(2))
    cos_TR, sin_TR = angles or (None, None)
    place = NO_NORM if norms is None else NORM_AFTER if norms.after_rotation else NORM_BEFORE
    _rotate_and_write[(rows, num_queries + num_kv)](
        qkv_THP,
        q_THP,
        k,
        v,
        slots_T,
        q_THP if cos_TR is None else cos_TR.contiguous(),
        q_THP if sin_TR is None else sin_TR.contiguous(),
        q_THP if norms is None else norms.q_P,
        q_THP if norms is None else norms.k_P,
        0.0 if norms is None else norms.eps,
        num_queries,
        num_kv,
        SIZE=size,
        ROTATED=0 if cos_TR is None else cos_TR.shape[1],
        BLOCK=triton.next_power_of_2(size),
        INTERLEAVED=heads.interleaved,
        NORM=place,
        VALUE_NORM=norms is not None and norms.values,
        BY_SLOTS=in_rows,
        num_warps=1 if size <= 128 else 4,
    )
    if num_kv and not in_rows:
        write_kv(k, v, cache, slots_T)
    return q_THP


def _activate(gate_up_TF: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    gate_up_TF = gate_up_TF.contiguous()
    rows, columns = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = gate_up_TF.new_empty(rows, columns)
    if rows and columns:
        _gate[(rows, triton.cdiv(columns, COLUMNS))](gate_up_TF, out_TF, columns, IS_GELU=is_gelu, BLOCK=COLUMNS)
    return out_TF


@triton.jit
def _add_rms_norm(
    hidden, delta, weight, summed, normed, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):  # one program per row
    first = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(hidden + first + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        more = tl.load(delta + first + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(summed + first + columns, x, mask=inside)
    w = tl.load(weight + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    y = _times_weight(wide, tl.rsqrt(tl.sum(wide * wide, 0) / size + eps), w)
    tl.store(normed + first + columns, y.to(x.dtype), mask=inside)


@triton.jit
def _times_weight(x, scale, w):
    """``w * (x * scale)``. If ``w`` has 16 bits, ``x * scale`` is first rounded to its dtype."""
    return (x * scale).to(w.dtype).to(tl.float32) * w.to(tl.float32)


@triton.jit
def _gate(gate_up, out, columns, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):  # one program per BLOCK columns of a row
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    if IS_GELU:
        # (1 + tanh(y)) / 2 is the logistic function of 2y.
        x = x * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    else:
        x = x * tl.sigmoid(x)
    tl.store(out + row * columns + column, (x.to(gate.dtype).to(tl.float32) * up).to(gate.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_write(
    qkv,
    queries,
    keys,
    values,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    num_queries,
    num_kv,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    BY_SLOTS: tl.constexpr,
):  # one program per token and query head or KV head
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_key = head >= num_queries
    p = tl.arange(0, BLOCK)
    inside = p < SIZE
    token = qkv + row * (num_queries + 2 * num_kv) * SIZE
    mine = token + head * SIZE
    x = tl.load(mine + p, mask=inside, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    if INTERLEAVED:
        partner = p ^ 1
        is_first = p % 2 == 0
    else:
        partner = tl.where(p < ROTATED // 2, p + ROTATED // 2, p - ROTATED // 2)
        is_first = p < ROTATED // 2
    rotated = p < ROTATED
    other = tl.load(mine + partner, mask=rotated, other=0.0).to(tl.float32)
    if NORM != 0:
        w_q = tl.load(q_norm + p, mask=inside, other=0.0)
        w = tl.where(is_key, tl.load(k_norm + p, mask=inside, other=0.0), w_q)
    if NORM == 1:
        w_q = tl.load(q_norm + partner, mask=rotated, other=0.0)
        w_other = tl.where(is_key, tl.load(k_norm + partner, mask=rotated, other=0.0), w_q)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        wide = _times_weight(wide, scale, w).to(dtype).to(tl.float32)
        other = _times_weight(other, scale, w_other).to(dtype).to(tl.float32)
    if ROTATED > 0:
        c = tl.load(cos + row * ROTATED + p, mask=rotated, other=1.0).to(tl.float32)
        s = tl.load(sin + row * ROTATED + p, mask=rotated, other=0.0).to(tl.float32)
        wide = wide * c + tl.where(is_first, -other, other) * s
    if NORM == 2:
        wide = wide.to(dtype).to(tl.float32)
        wide = _times_weight(wide, tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps), w)
    tl.store(queries + (row * num_queries + head) * SIZE + p, wide.to(dtype), mask=inside & (head < num_queries))
    kv_head = head - num_queries
    entry = row
    if BY_SLOTS:
        entry = tl.load(slots + row)
    place = (entry * num_kv + kv_head) * SIZE + p
    tl.store(keys + place, wide.to(dtype), mask=inside & is_key)
    v = tl.load(token + (head + num_kv) * SIZE + p, mask=inside & is_key, other=0.0)
    if VALUE_NORM:
        v_wide = v.to(tl.float32)
        v = (v_wide * tl.rsqrt(tl.sum(v_wide * v_wide, 0) / SIZE + eps)).to(dtype)
    tl.store(values + place, v, mask=inside & is_key)
