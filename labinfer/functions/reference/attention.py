"""Attention over a paged KV cache (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labinfer.functions.layer_cache import LayerCache, read_keys, read_values, store


def write_kv(k_TKP: torch.Tensor, v_TKP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor) -> None:
    """Store each token's keys and values in its slot (block × block size + offset), in the number type of the cache."""
    slots = cache.by_slot()
    store(k_TKP, slots.k, slots.k_scale, slots_T)
    store(v_TKP, slots.v, slots.v_scale, slots_T)


def paged_attention(
    q_THP: torch.Tensor,
    cache: LayerCache,
    row_ptr: list[int],
    context_lens: list[int],
    block_tables: list[torch.Tensor],
    kv_of_query_H: torch.Tensor | None,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of a flat batch of new tokens over everything their sequences have cached.

    Args:
        q_THP: queries; the tokens of sequence b are rows ``row_ptr[b]:row_ptr[b + 1]``, the last of its context.
        cache: with the new tokens' keys and values written already. Whatever its number type, the arithmetic is in
            that of the queries.
        context_lens: S per sequence, new tokens included.
        block_tables: the blocks of each sequence in order, int64.
        kv_of_query_H: the KV head of each query head, or None where query head h reads KV head ``h // (H / K)``.
        scale: factor on the scores.
        window: a query sees this many tokens, itself included (Beltagy et al. 2020, arXiv:2004.05150); 0 for all.

    Returns:
        (T, H, P) in the type of the queries.
    """
    out_THP = torch.empty_like(q_THP)
    for b, context_len in enumerate(context_lens):
        rows = slice(row_ptr[b], row_ptr[b + 1])
        num_new = row_ptr[b + 1] - row_ptr[b]
        first = max(0, context_len - num_new - window + 1) if window else 0  # what no query sees is not read
        skipped, offset = divmod(first, cache.k.shape[1])
        blocks = block_tables[b][skipped:]
        num_seen = context_len - first
        k_HSP = read_keys(cache, blocks, q_THP.dtype)[offset : offset + num_seen].transpose(0, 1)
        v_HSP = read_values(cache, blocks, q_THP.dtype)[offset : offset + num_seen].transpose(0, 1)
        if kv_of_query_H is not None:
            k_HSP, v_HSP = k_HSP[kv_of_query_H], v_HSP[kv_of_query_H]
        q_HTP = q_THP[rows].transpose(0, 1)
        mask_TS = None
        if num_new > 1:
            mask_TS = torch.ones(num_new, num_seen, dtype=torch.bool, device=q_THP.device).tril(num_seen - num_new)
            if window:
                mask_TS = mask_TS.triu(num_seen - num_new - window + 1)
        attended_HTP = F.scaled_dot_product_attention(
            q_HTP.unsqueeze(0),
            k_HSP.unsqueeze(0),
            v_HSP.unsqueeze(0),
            attn_mask=mask_TS,
            scale=scale,
            enable_gqa=kv_of_query_H is None,
        )[0]
        out_THP[rows] = attended_HTP.transpose(0, 1)
    return out_THP
