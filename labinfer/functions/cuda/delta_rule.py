"""Gated delta rule and its causal convolution in Triton, for decode steps (one token per sequence); other steps use the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.reference import delta_rule as reference

CHANNELS = 256
"""Channels of the convolution that one Triton program computes."""
COLUMNS = 32
"""Columns of a head's state that one Triton program updates."""


def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    bias_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal convolution of each sequence's rows with its previous inputs; see ``CausalConv``."""
    if not (batch.has_single_rows(x_TC) and x_TC.stride(1) == 1 and state.is_contiguous()):
        return reference.causal_conv(x_TC, weight_WC, state, batch, bias_C)
    num_rows, channels = x_TC.shape
    out_TC = x_TC.new_empty(num_rows, channels)
    _convolve[(num_rows, triton.cdiv(channels, CHANNELS))](
        out_TC,
        x_TC,
        weight_WC,
        weight_WC if bias_C is None else bias_C,
        state,
        batch.context_lens_B,
        batch.state_slots_B,
        x_TC.stride(0),
        channels,
        HAS_BIAS=bias_C is not None,
        WIDTH=weight_WC.shape[0],
        CHANNELS=CHANNELS,
        num_warps=2,
    )
    return out_TC


def delta_rule(
    qkv_TC: torch.Tensor, gates_TG: torch.Tensor, state: torch.Tensor, batch: AttentionBatch, heads: DeltaHeads
) -> torch.Tensor:
    """Update the recurrent states and read them with the queries; see ``DeltaRule``."""
    _, num_heads, key_size, value_size = state.shape
    num_keys = (qkv_TC.shape[1] - num_heads * value_size) // (2 * key_size)
    group = num_heads // max(1, num_keys)
    is_even = heads.key_heads_H.tolist() == [head // group for head in range(num_heads)]
    if not (batch.has_single_rows(qkv_TC) and is_even and state.is_contiguous()):
        return reference.delta_rule(qkv_TC, gates_TG, state, batch, heads)
    num_rows = qkv_TC.shape[0]
    out_THP = qkv_TC.new_empty(num_rows, num_heads, value_size)
    _step[(num_rows, num_heads, triton.cdiv(value_size, COLUMNS))](
        out_THP,
        qkv_TC.contiguous(),
        gates_TG.contiguous(),
        state,
        batch.context_lens_B,
        batch.state_slots_B,
        heads.rate_H,
        heads.bias_H,
        num_heads,
        num_keys,
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEYS=triton.next_power_of_2(key_size),
        COLUMNS=COLUMNS,
        EPS=reference.L2_EPS,
        num_warps=4,
    )
    return out_THP


@triton.jit(do_not_specialize_on_alignment=["context_lens", "slots"])
def _convolve(
    out,
    x,
    weight,
    bias,
    state,
    context_lens,
    slots,
    x_stride,
    channels,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # one program per sequence and CHANNELS channels
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    has_state = tl.load(context_lens + row) > 1
    place = state + tl.load(slots + row) * (WIDTH - 1) * channels + channel
    own = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
    total = own.to(tl.float32) * tl.load(weight + (WIDTH - 1) * channels + channel, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    for index in tl.static_range(WIDTH - 1):
        before = tl.load(place + index * channels, mask=inside & has_state, other=0.0)
        total += before.to(tl.float32) * tl.load(weight + index * channels + channel, mask=inside, other=0.0)
        if index > 0:
            tl.store(place + (index - 1) * channels, before, mask=inside)
    if WIDTH > 1:
        tl.store(place + (WIDTH - 2) * channels, own, mask=inside)
    tl.store(out + row * channels + channel, (total * tl.sigmoid(total)).to(own.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["context_lens", "slots"])
def _step(
    out,
    qkv,
    gates,
    state,
    context_lens,
    slots,
    rates,
    biases,
    num_heads,
    num_keys,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
):  # one program per value head and COLUMNS columns of its state
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = i < KEY_SIZE, column < VALUE_SIZE
    inside = is_key[:, None] & is_column[None, :]
    token = qkv + row * (2 * num_keys * KEY_SIZE + num_heads * VALUE_SIZE)
    q = tl.load(token + head // GROUP * KEY_SIZE + i, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(token + (num_keys + head // GROUP) * KEY_SIZE + i, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(token + 2 * num_keys * KEY_SIZE + head * VALUE_SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * tl.rsqrt(KEY_SIZE * 1.0)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    b = tl.load(gates + row * 2 * num_heads + head).to(tl.float32)
    a = tl.load(gates + row * 2 * num_heads + num_heads + head).to(tl.float32) + tl.load(biases + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.exp(-tl.load(rates + head) * softplus)
    place = state + ((tl.load(slots + row) * num_heads + head) * KEY_SIZE + i[:, None]) * VALUE_SIZE + column[None, :]
    s = tl.load(place, mask=inside & (tl.load(context_lens + row) > 1), other=0.0) * decay
    correction = (v - tl.sum(k[:, None] * s, 0)) * tl.sigmoid(b)
    s += k[:, None] * correction[None, :]
    tl.store(place, s, mask=inside)
    read = tl.sum(q[:, None] * s, 0)
    tl.store(out + (row * num_heads + head) * VALUE_SIZE + column, read.to(out.dtype.element_ty), mask=is_column)
