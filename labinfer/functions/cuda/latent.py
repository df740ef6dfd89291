"""Latent attention in Triton, for decode steps (one token per sequence); other steps use the reference.

Queries are absorbed (see ``functions.reference.latent_attention``): the latents act as keys and values of a single KV head, so a
tile of latents is read once for the scores and the sums of many heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.cuda.attention import MAX_SPLITS, count_splits, join_parts, make_parts
from labinfer.functions.latent_cache import LatentCache
from labinfer.functions.reference import latent_attention as reference

HEADS = 16
"""Query heads that one Triton program computes."""
TILE = 32
"""Keys of a tile with 16-bit latents of the usual size 512; half as many with 32 bits."""


def latent_attention(
    q_THQ: torch.Tensor, cache: LatentCache, batch: AttentionBatch, weight_HUL: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention over cached latents; see ``LatentAttention``."""
    if not batch.has_single_rows(q_THQ) or cache.latent_scale is not None:
        return reference.latent_attention(q_THQ, cache, batch, weight_HUL, scale)
    num_rows, heads, size = q_THQ.shape
    rank, rotated = cache.rank, cache.latent.shape[2] - cache.rank
    nope = size - rotated
    q_THC = torch.empty(num_rows, heads, rank + rotated, dtype=q_THQ.dtype, device=q_THQ.device)
    q_THC[..., rank:] = q_THQ[..., nope:]
    q_THC[..., :rank] = torch.bmm(q_THQ[..., :nope].transpose(0, 1), weight_HUL[:, :nope]).transpose(0, 1)
    sums_THL = q_THC.new_empty(num_rows, heads, rank)
    head_blocks = triton.cdiv(heads, HEADS)
    splits = count_splits(max(1, num_rows) * head_blocks, MAX_SPLITS)
    parts, stats = make_parts(sums_THL, splits)
    _attend_latents[(num_rows, head_blocks, splits)](
        sums_THL,
        q_THC,
        cache.latent,
        batch.tables_N,
        batch.table_ptr_B,
        batch.context_lens_B,
        parts,
        stats,
        heads,
        scale,
        RANK=rank,
        ROTATED=rotated,
        LATENT=max(16, triton.next_power_of_2(rank)),
        TURNED=max(16, triton.next_power_of_2(rotated)),
        PAGE=cache.block_size,
        HEADS=HEADS,
        TILE=TILE if q_THC.itemsize == 2 else TILE // 2,
        SPLITS=splits,
        num_warps=4,
        num_stages=2 if q_THC.itemsize == 2 else 1,
    )
    if splits > 1:
        join_parts(sums_THL, parts, stats)
    return torch.bmm(sums_THL.transpose(0, 1), weight_HUL[:, nope:].transpose(1, 2)).transpose(0, 1).contiguous()


@triton.jit(do_not_specialize_on_alignment=["tables", "table_ptr", "context_lens"])
def _attend_latents(
    out,
    queries,
    latents,
    tables,
    table_ptr,
    context_lens,
    parts,
    stats,
    num_heads,
    scale,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    LATENT: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # one program per sequence, HEADS heads and split of the keys
    sequence, split = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    i, r = tl.arange(0, LATENT), tl.arange(0, TURNED)
    is_latent, is_turned = i < RANK, r < ROTATED
    place = sequence.to(tl.int64) * num_heads + head
    at = queries + place[:, None] * (RANK + ROTATED)
    q = tl.load(at + i[None, :], mask=is_head[:, None] & is_latent[None, :], other=0.0)
    q_turned = tl.load(at + RANK + r[None, :], mask=is_head[:, None] & is_turned[None, :], other=0.0)
    context = tl.load(context_lens + sequence).to(tl.int32)
    tiles_each = tl.cdiv(tl.cdiv(context, TILE), SPLITS)
    begin = split * tiles_each * TILE
    end = tl.minimum(begin + tiles_each * TILE, context)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, LATENT], tl.float32)
    table = tables + tl.load(table_ptr + sequence)
    for first in range(begin, end, TILE):
        key = first + tl.arange(0, TILE)
        is_key = key < end
        slot = tl.load(table + key // PAGE, mask=is_key, other=0) * PAGE + key % PAGE
        entry = latents + slot[:, None] * (RANK + ROTATED)
        latent = tl.load(entry + i[None, :], mask=is_key[:, None] & is_latent[None, :], other=0.0).to(q.dtype)
        turned = tl.load(entry + RANK + r[None, :], mask=is_key[:, None] & is_turned[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
        scores = tl.where(is_key[None, :], scores * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        shrink = tl.exp(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(q.dtype), latent, input_precision="ieee")
        largest = larger
    is_written = is_head[:, None] & is_latent[None, :]
    if SPLITS == 1:
        tl.store(out + place[:, None] * RANK + i[None, :], (sums / total[:, None]).to(q.dtype), mask=is_written)
    else:
        tl.store(parts + (place[:, None] * SPLITS + split) * RANK + i[None, :], sums, mask=is_written)
        tl.store(stats + place * 2 * SPLITS + split, largest, mask=is_head)
        tl.store(stats + place * 2 * SPLITS + SPLITS + split, total, mask=is_head)
