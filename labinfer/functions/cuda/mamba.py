"""Scan of the Mamba-2 mixer in Triton, for decode steps (one token per sequence); other steps use the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.reference import mamba as reference

COLUMNS = 32
"""Columns of a head's state that one Triton program updates."""


def selective_scan(
    xbc_TC: torch.Tensor, dt_TH: torch.Tensor, state: torch.Tensor, batch: AttentionBatch, heads: MambaHeads
) -> torch.Tensor:
    """Update the recurrent states and read them; see ``SelectiveScan``."""
    _, num_heads, state_size, head_size = state.shape
    num_groups = (xbc_TC.shape[1] - num_heads * head_size) // (2 * state_size)
    heads_per_group = num_heads // max(1, num_groups)
    is_even = heads.groups_H.tolist() == [head // heads_per_group for head in range(num_heads)]
    if not (batch.has_single_rows(xbc_TC) and is_even and dt_TH.stride(1) == 1 and state.is_contiguous()):
        return reference.selective_scan(xbc_TC, dt_TH, state, batch, heads)
    num_rows = xbc_TC.shape[0]
    out_THP = xbc_TC.new_empty(num_rows, num_heads, head_size)
    _step[(num_rows, num_heads, triton.cdiv(head_size, COLUMNS))](
        out_THP,
        xbc_TC.contiguous(),
        dt_TH,
        state,
        batch.context_lens_B,
        batch.state_slots_B,
        heads.rate_H,
        heads.bias_H,
        heads.skip_H,
        dt_TH.stride(0),
        num_heads,
        num_groups,
        heads.min_dt,
        heads.max_dt,
        HEADS_PER_GROUP=heads_per_group,
        STATE_SIZE=state_size,
        HEAD_SIZE=head_size,
        ROWS=triton.next_power_of_2(state_size),
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return out_THP


@triton.jit(do_not_specialize_on_alignment=["context_lens", "slots"])
def _step(
    out,
    xbc,
    dts,
    state,
    context_lens,
    slots,
    rates,
    biases,
    skips,
    dt_stride,
    num_heads,
    num_groups,
    min_dt,
    max_dt,
    HEADS_PER_GROUP: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # one program per head and COLUMNS columns of its state
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = n < STATE_SIZE, column < HEAD_SIZE
    inside = is_row[:, None] & is_column[None, :]
    token = xbc + row * (num_heads * HEAD_SIZE + 2 * num_groups * STATE_SIZE)
    x = tl.load(token + head * HEAD_SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    group = token + num_heads * HEAD_SIZE + head // HEADS_PER_GROUP * STATE_SIZE + n
    b = tl.load(group, mask=is_row, other=0.0).to(tl.float32)
    c = tl.load(group + num_groups * STATE_SIZE, mask=is_row, other=0.0).to(tl.float32)
    dt = tl.load(dts + row * dt_stride + head).to(tl.float32) + tl.load(biases + head)
    dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    dt = tl.minimum(tl.maximum(dt, min_dt), max_dt)
    decay = tl.exp(-tl.load(rates + head) * dt)
    place = state + ((tl.load(slots + row) * num_heads + head) * STATE_SIZE + n[:, None]) * HEAD_SIZE + column[None, :]
    s = tl.load(place, mask=inside & (tl.load(context_lens + row) > 1), other=0.0) * decay
    s += b[:, None] * (dt * x)[None, :]
    tl.store(place, s, mask=inside)
    read = tl.sum(c[:, None] * s, 0) + tl.load(skips + head) * x
    tl.store(out + (row * num_heads + head) * HEAD_SIZE + column, read.to(out.dtype.element_ty), mask=is_column)
