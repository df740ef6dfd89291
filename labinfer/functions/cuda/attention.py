"""Paged attention in Triton: tiles of queries over tiles of keys with an online softmax (Dao 2023, arXiv:2307.08691); for few
queries the keys are split among programs (split-KV; Dao et al. 2023, "Flash-Decoding").

Programs read the batch's metadata from GPU memory, so that a captured step stays valid while contexts grow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference import attention

PROGRAMS = 256
"""Number of Triton programs that keep a large GPU busy."""
MAX_SPLITS = 32
"""Maximum number of parts into which a sequence's keys are split."""
QUERIES = 64
"""Query rows (heads × tokens) of one program in long prefills."""
TILE_BYTES = 16 << 10
"""Maximum bytes of a tile of keys: several tiles share a multiprocessor's shared memory, 100 KiB on small GPUs."""


def paged_attention(
    q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads
) -> torch.Tensor:
    """Causal attention of any batch over the paged KV cache; see ``PagedAttention``."""
    rows, num_heads, size = q_THP.shape
    num_kv, sinks_H = len(heads.head_ptr) - 1, heads.sinks_H
    group = num_heads // num_kv
    if cache.is_tiled or heads.head_ptr.tolist() != list(range(0, num_heads + 1, group)):
        return attention.paged_attention(q_THP, cache, batch, heads)
    q_THP, num_sequences = q_THP.contiguous(), batch.context_lens_B.shape[0]
    out_THP = torch.empty_like(q_THP)
    if not rows:
        return out_THP
    block_head = max(16, triton.next_power_of_2(size))
    one_row = batch.has_single_rows(q_THP)
    rows_each = 1 if one_row else max(1, (QUERIES if block_head * q_THP.itemsize <= 256 else 16) // group)
    query_blocks = num_sequences if one_row else rows // rows_each + num_sequences
    splits = count_splits(query_blocks * num_kv, MAX_SPLITS)
    parts, stats = make_parts(out_THP, splits)
    tile = min(64, max(16, TILE_BYTES // (block_head * q_THP.itemsize)))
    _attend[(query_blocks, num_kv, splits)](
        out_THP,
        q_THP,
        cache.k,
        cache.v,
        out_THP if cache.k_scale is None else cache.k_scale,
        out_THP if cache.v_scale is None else cache.v_scale,
        batch.tables_N,
        batch.table_ptr_B,
        batch.row_ptr_B,
        batch.context_lens_B,
        out_THP if sinks_H is None else sinks_H,
        parts,
        stats,
        num_sequences,
        num_kv,
        heads.scale,
        heads.cap,
        GROUP=group,
        SIZE=size,
        BLOCK_HEAD=block_head,
        PAGE=cache.block_size,
        ROWS=rows_each,
        QUERIES=max(16, triton.next_power_of_2(rows_each * group)),
        TILE=tile,
        SPLITS=splits,
        WINDOW=heads.window,
        IS_INT8=cache.k_scale is not None,
        HAS_SINKS=sinks_H is not None,
        HAS_CAP=heads.cap > 0,
        ONE_ROW=one_row,
        PRECISION="ieee",
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        join_parts(out_THP, parts, stats)
    return out_THP


def count_splits(programs: int, most: int) -> int:
    """Number of splits of each program's work, so that about ``PROGRAMS`` programs run: at most ``most``, and a power of two, because
    each number is a separate compilation."""
    splits = max(1, min(most, PROGRAMS // programs))
    return 1 << (splits.bit_length() - 1)


def make_parts(out_THP: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers ``(parts, stats)`` of partial results for ``join_parts``; with one split, ``out_THP`` itself."""
    if splits == 1:
        return out_THP, out_THP
    rows, heads, size = out_THP.shape
    shapes = ((rows, heads, splits, size), (rows, heads, 2, splits))
    return tuple(out_THP.new_empty(shape, dtype=torch.float32) for shape in shapes)


def join_parts(out_THP: torch.Tensor, parts: torch.Tensor, stats: torch.Tensor) -> None:
    """Merge the partial softmax results of split keys into ``out_THP``.

    Args:
        parts: (T, H, splits, P), sums of values weighted by exp(score - maximum score); float32.
        stats: (T, H, 2, splits), maximum scores and sums of the weights; float32.
    """
    rows, heads, splits, size = parts.shape
    block = triton.next_power_of_2(size)
    _join[(rows * heads,)](
        out_THP, parts, stats, SIZE=size, BLOCK_HEAD=block, SPLITS=splits, num_warps=1 if block <= 256 else 4
    )


@triton.jit(
    do_not_specialize=["num_sequences"],
    # Views of one integer buffer; their offsets depend on the numbers of sequences and rows.
    do_not_specialize_on_alignment=["tables", "table_ptr", "row_ptr", "context_lens"],
)
def _attend(
    out,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    table_ptr,
    row_ptr,
    context_lens,
    sinks,
    parts,
    stats,
    num_sequences,
    num_kv,
    scale,
    cap,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ONE_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # one program per block of ROWS tokens of a sequence, KV head and split of the keys
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = block
    number = 0
    if not ONE_ROW:
        sequence = _find_sequence(row_ptr, num_sequences, block, ROWS)
        number = block - (tl.load(row_ptr + sequence) // ROWS + sequence).to(tl.int32)
    begin = tl.load(row_ptr + sequence)
    num_new = (tl.load(row_ptr + sequence + 1) - begin).to(tl.int32)
    if number * ROWS >= num_new:
        return
    earlier = tl.load(context_lens + sequence).to(tl.int32) - num_new
    query = tl.arange(0, QUERIES)
    row = number * ROWS + query // GROUP
    head = kv_head * GROUP + query % GROUP
    is_query = (query < ROWS * GROUP) & (row < num_new)
    position = earlier + row
    p = tl.arange(0, BLOCK_HEAD)
    inside = p < SIZE
    place = (begin + row) * (num_kv * GROUP) + head
    q = tl.load(queries + place[:, None] * SIZE + p[None, :], mask=is_query[:, None] & inside[None, :], other=0.0)
    end = earlier + tl.minimum(number * ROWS + ROWS, num_new)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(earlier + number * ROWS - WINDOW + 1, 0)
    first_tile = start // TILE
    last_tile = tl.cdiv(end, TILE)
    tiles_each = tl.cdiv(last_tile - first_tile, SPLITS)
    begin_tile = first_tile + split * tiles_each
    end_tile = tl.minimum(begin_tile + tiles_each, last_tile)

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, BLOCK_HEAD], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(split == 0, total + 1.0, total)
    table = tables + tl.load(table_ptr + sequence)
    for tile in range(begin_tile, end_tile):
        key = tile * TILE + tl.arange(0, TILE)
        is_key = (key >= start) & (key < end)  # other slots of a block may hold NaN
        slot = tl.load(table + key // PAGE, mask=is_key, other=0) * PAGE + key % PAGE
        entry = slot * num_kv + kv_head
        k = tl.load(keys + entry[None, :] * SIZE + p[:, None], mask=inside[:, None] & is_key[None, :], other=0)
        v = tl.load(values + entry[:, None] * SIZE + p[None, :], mask=is_key[:, None] & inside[None, :], other=0)
        if IS_INT8:
            k = k.to(tl.float32) * tl.load(key_scales + entry, mask=is_key, other=0.0)[None, :]
            v = v.to(tl.float32) * tl.load(value_scales + entry, mask=is_key, other=0.0)[:, None]
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        if HAS_CAP:  # tanh(y) is twice the logistic function of 2y, minus 1
            scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
        sees = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            sees = sees & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        largest = larger
    is_written = is_query[:, None] & inside[None, :]
    if SPLITS == 1:
        total = tl.where(is_query, total, 1.0)
        tl.store(out + place[:, None] * SIZE + p[None, :], (sums / total[:, None]).to(q.dtype), mask=is_written)
    else:
        tl.store(parts + (place[:, None] * SPLITS + split) * SIZE + p[None, :], sums, mask=is_written)
        tl.store(stats + place * 2 * SPLITS + split, largest, mask=is_query)
        tl.store(stats + place * 2 * SPLITS + SPLITS + split, total, mask=is_query)


@triton.jit
def _find_sequence(row_ptr, num_sequences, block, ROWS: tl.constexpr):
    """Index of the sequence to which a block of queries belongs. The blocks of sequence b begin at ``row_ptr[b] // ROWS + b``."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32) + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = tl.load(row_ptr + middle) // ROWS + middle <= block
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle)
    return low


@triton.jit
def _join(
    out, parts, stats, SIZE: tl.constexpr, BLOCK_HEAD: tl.constexpr, SPLITS: tl.constexpr
):  # one program per head
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    p = tl.arange(0, BLOCK_HEAD)
    inside = p < SIZE
    largest = tl.load(stats + place * 2 * SPLITS + split)
    total = tl.load(stats + place * 2 * SPLITS + SPLITS + split)
    weights = tl.exp(largest - tl.max(largest, 0))
    sums = tl.load(parts + (place * SPLITS + split[:, None]) * SIZE + p[None, :], mask=inside[None, :], other=0.0)
    joined = tl.sum(sums * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out + place * SIZE + p, joined.to(out.dtype.element_ty), mask=inside)
