"""Writes to a paged KV cache, and attention over it."""

from __future__ import annotations

from itertools import pairwise

import torch

from stub_torch_npu.graphs import updatable
from stub_torch_npu.limits import HALF, require, require_dtype, require_plain

PAGE = "torch_npu-npu_fused_infer_attention_score.md"
UNLIMITED = 2147483647


def npu_scatter_pa_kv_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    compress_lens=None,
    compress_seq_offsets=None,
    seq_lens=None,
    cache_mode="PA_NZ",
):
    page = "torch_npu-npu_scatter_pa_kv_cache.md; aclnnScatterPaKvCache.md"
    require(compress_lens is compress_seq_offsets is seq_lens is None, page, "arguments that this stand-in lacks")
    require(cache_mode == "Norm", page, "pools in the layout ND")
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in tensors.items():
        require_plain(tensor, page, name)
        require_dtype(tensor, (*HALF, torch.int8), page, name)  # float32 only on newer chips than A3
    require(len({tensor.dtype for tensor in tensors.values()}) == 1, page, "one dtype")
    require(key.dim() == value.dim() == 3 and key.shape[:2] == value.shape[:2], page, "key and value (T, K, P)")
    require(key_cache.dim() == value_cache.dim() == 4, page, "pools have 4 dimensions")
    require(key_cache.shape[2:] == key.shape[1:] and value_cache.shape[2:] == value.shape[1:], page, "(.., .., K, P)")
    require_dtype(slot_mapping, (torch.int32, torch.int64), page, "slot_mapping")
    require_plain(slot_mapping, page, "slot_mapping")
    require(slot_mapping.shape == key.shape[:1], page, "a slot for each token")
    slots = slot_mapping.tolist()
    places = key_cache.shape[0] * key_cache.shape[1]
    require(min(slots) >= 0 and max(slots) < places, page, f"slots in 0 … {places - 1}")
    require(len(set(slots)) == len(slots), page, "each slot once")
    key_cache.flatten(0, 1)[slot_mapping] = key
    value_cache.flatten(0, 1)[slot_mapping] = value


@updatable
def npu_fused_infer_attention_score(
    query,
    key,
    value,
    *,
    atten_mask=None,
    actual_seq_lengths=None,
    actual_seq_lengths_kv=None,
    block_table=None,
    num_heads=1,
    scale=1.0,
    pre_tokens=UNLIMITED,
    next_tokens=UNLIMITED,
    input_layout="BSH",
    num_key_value_heads=0,
    sparse_mode=0,
    block_size=0,
):
    require(input_layout in ("BSND", "TND"), PAGE, "a layout that this stand-in has")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_plain(tensor, PAGE, name)
        require_dtype(tensor, HALF, PAGE, name)
    heads, size = query.shape[-2:]
    kv_heads = num_key_value_heads or heads
    require(query.dim() == (4 if input_layout == "BSND" else 3) and heads == num_heads, PAGE, "query has num_heads")
    require(heads % kv_heads == 0 and heads // kv_heads <= 64 and heads <= 256, PAGE, f"{heads} and {kv_heads} heads")
    require(size % 16 == 0 and size <= 512, PAGE, f"D {size}")
    _check_pools(query, key, value, block_table, block_size, kv_heads)
    if input_layout == "TND":
        require(actual_seq_lengths is not None, PAGE, "the sums of the queries' lengths")
        ends = list(actual_seq_lengths)
        require(size == 128, PAGE, f"D 128 without rope in the layout TND, not {size}")
        require(sparse_mode in (0, 3), "aclnnFusedInferAttentionScoreV4.md", "sparse_mode of the layout TND")
        require(len(ends) <= 4096 and len(query) <= 1048576, PAGE, "at most 4096 sequences and 1048576 tokens")
        require(block_size % 16 == 0 and block_size <= 1024, PAGE, f"block size {block_size}")
        require(ends == sorted(ends) and ends[-1] == len(query), PAGE, "rising sums up to the number of tokens")
    else:
        require(actual_seq_lengths is None, PAGE, "no lengths of queries, which all have one")
        ends = [query.shape[1] * (index + 1) for index in range(len(query))]
    lengths = list(actual_seq_lengths_kv)
    begins = [0, *ends[:-1]]
    counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
    _check_lengths(counts, lengths, block_table, block_size, len(key))
    _check_mask(atten_mask, sparse_mode, max(counts), block_table, block_size)
    flat = query.flatten(0, -3)
    out = torch.empty_like(flat)
    for index, (begin, end) in enumerate(pairwise([0, *ends])):
        blocks = block_table[index, : -(-lengths[index] // block_size)].long()
        k, v = (x[blocks].view(-1, kv_heads, size)[: lengths[index]].float() for x in (key, value))
        hidden = _hidden(atten_mask, sparse_mode, end - begin, lengths[index], (pre_tokens, next_tokens), index)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (k, v))
        scores = flat[begin:end].float().transpose(0, 1) @ k.transpose(1, 2) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out.view(query.shape), torch.zeros(1)


def _check_pools(query, key, value, block_table, block_size, kv_heads):
    """Pools (blocks, block size, K * P) of paged attention."""
    require(key.shape == value.shape and key.dtype == value.dtype == query.dtype, PAGE, "key and value are alike")
    require(key.dim() == 3 and key.shape[1:] == (block_size, kv_heads * query.shape[-1]), PAGE, "pools BnBsH")
    require(key.shape[2] <= 65535, PAGE, "H is at most 65535")
    require(key.numel() <= 2**31 - 1, PAGE, "elements of a pool fit int32")
    require(block_table.dtype == torch.int32 and block_table.dim() == 2, PAGE, "block_table (B, N) in int32")
    require(block_table.is_contiguous(), PAGE, "block_table is contiguous")
    require(block_table.min() >= 0 and block_table.max() < len(key), PAGE, "blocks of the pool")


def _check_lengths(counts, lengths, block_table, block_size, num_blocks):
    sequences, width = block_table.shape
    require(len(lengths) == sequences == len(counts), PAGE, "a length for each sequence")
    blocks = [-(-length // block_size) for length in lengths]
    require(max(blocks) <= width, PAGE, "block_table has the blocks of the longest sequence")
    require(sum(blocks) <= num_blocks, PAGE, "the pool has as many blocks as all sequences together")
    require(all(count <= length for count, length in zip(counts, lengths, strict=True)), PAGE, "queries are keys, too")
    if max(counts) == 1:
        require(block_size % 16 == 0 and block_size <= 512, PAGE, f"block size {block_size} for single queries")
        require(max(lengths) <= 262144 and sequences <= 65536, PAGE, "at most 262144 keys")
    else:
        require(block_size % 128 == 0 and block_size <= 512, PAGE, f"block size {block_size} for several queries")


def _check_mask(mask, sparse_mode, most, block_table, block_size):
    require(sparse_mode in (0, 3, 4), PAGE, f"sparse_mode {sparse_mode}")
    if sparse_mode in (3, 4):
        require(mask is not None and mask.shape == (2048, 2048), PAGE, "the mask of 2048 x 2048")
        require(torch.equal(mask, torch.ones_like(mask).triu(1)), PAGE, "hidden keys are above the diagonal")
    if mask is not None:
        require_dtype(mask, (torch.bool, torch.int8, torch.uint8), PAGE, "atten_mask")
        require_plain(mask, PAGE, "atten_mask")
    if mask is not None and sparse_mode == 0:
        require(most == 1, PAGE, "a mask (B, KV_S) for single queries")
        require(mask.shape == (len(block_table), block_table.shape[1] * block_size), PAGE, "the mask has all keys")


def _hidden(mask, sparse_mode, count, length, tokens, index):
    """Keys that a sequence's queries do not see, (count, length) bool. For single queries ``sparse_mode`` has no effect."""
    hidden = torch.zeros(count, length, dtype=torch.bool)
    if sparse_mode == 0:
        return hidden if mask is None else mask[index, :length].bool().expand(count, length)
    if count == 1:
        return hidden
    offset = torch.arange(length) - (torch.arange(count) + length - count).unsqueeze(1)
    if sparse_mode == 3:
        return offset > 0
    before, after = tokens
    return (offset > after) | (offset < -before)
