"""Attention over a paged KV cache (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads, QKVHeads
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference.elementwise import rms_norm, rotary


def rotate_and_write(
    qkv_THP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, angles: Angles | None, heads: QKVHeads
) -> torch.Tensor:
    """Rotate queries and keys; store keys and values, if any, in the dtype of the cache."""
    num_kv, norms = heads.num_kv, heads.norms
    q_THP, k_TKP, v_TKP = qkv_THP.split([qkv_THP.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    if norms is not None and not norms.after_rotation:
        q_THP, k_TKP = rms_norm(q_THP, norms.q_P, norms.eps), rms_norm(k_TKP, norms.k_P, norms.eps)
    if angles is not None:
        q_THP, k_TKP = (rotary(x, *angles, heads.interleaved) for x in (q_THP, k_TKP))
    if norms is not None and norms.after_rotation:
        q_THP, k_TKP = rms_norm(q_THP, norms.q_P, norms.eps), rms_norm(k_TKP, norms.k_P, norms.eps)
    if norms is not None and norms.values:
        v_TKP = rms_norm(v_TKP, v_TKP.new_ones(v_TKP.shape[-1]), norms.eps)
    if num_kv:
        write_kv(k_TKP, v_TKP, cache, slots_T)
    return q_THP.contiguous()


def write_kv(k_TKP: torch.Tensor, v_TKP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor) -> None:
    """Store each token's keys and values in its slot, in the dtype of the cache."""
    cache.keys.store(k_TKP, slots_T)
    cache.values.store(v_TKP, slots_T)


def paged_attention(
    q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads
) -> torch.Tensor:
    """Causal attention, sequence by sequence; reads only keys inside some query's window."""
    out_THP = torch.empty_like(q_THP)
    for b in range(len(batch.context_lens)):
        rows = slice(batch.row_ptr[b], batch.row_ptr[b + 1])
        out_THP[rows] = attend(q_THP[rows], cache, batch, heads, b)
    return out_THP


def attend(
    q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads, b: int
) -> torch.Tensor:
    """Attention of sequence ``b`` of the batch; ``q_THP`` holds the queries of this sequence only."""
    num_new, context_len, window = q_THP.shape[0], batch.context_lens[b], heads.window
    first = max(0, context_len - num_new - window + 1) if window else 0  # keys before every query's window are not read
    skipped, offset = divmod(first, cache.block_size)
    blocks = batch.tables_N[batch.table_ptr[b] + skipped : batch.table_ptr[b + 1]]
    num_seen = context_len - first
    k_HSP = cache.keys.load(blocks, q_THP.dtype)[offset : offset + num_seen].transpose(0, 1)
    v_HSP = cache.values.load(blocks, q_THP.dtype)[offset : offset + num_seen].transpose(0, 1)
    groups = heads.head_ptr.diff().tolist()
    even = len(set(groups)) == 1
    if not even:
        # cat of views, not repeat_interleave, which would copy the counts to the accelerator in every layer
        k_HSP, v_HSP = (
            torch.cat([x_KSP[kv].expand(count, -1, -1) for kv, count in enumerate(groups)]) for x_KSP in (k_HSP, v_HSP)
        )
    mask_TS = None
    if num_new > 1:
        mask_TS = torch.ones(num_new, num_seen, dtype=torch.bool, device=q_THP.device).tril(num_seen - num_new)
        if window:
            mask_TS = mask_TS.triu(num_seen - num_new - window + 1)
    if heads.sinks_H is not None:
        k_HSP, v_HSP, mask_TS = with_sinks(k_HSP, v_HSP, mask_TS, heads.sinks_H, num_new)
    q_HTP = q_THP.transpose(0, 1)
    if heads.cap:  # torch's function has no cap: it gets the capped scores as its mask, and queries of zeros
        keys_HPS = k_HSP.repeat_interleave(len(q_HTP) // len(k_HSP), dim=0).mT
        scores_HTS = heads.cap * torch.tanh(q_HTP @ keys_HPS * (heads.scale / heads.cap))
        if mask_TS is not None:
            hidden = mask_TS.dtype == torch.bool
            scores_HTS = scores_HTS.masked_fill(~mask_TS, float("-inf")) if hidden else scores_HTS + mask_TS
        q_HTP, mask_TS = torch.zeros_like(q_HTP), scores_HTS
    return F.scaled_dot_product_attention(
        q_HTP.unsqueeze(0),
        k_HSP.unsqueeze(0),
        v_HSP.unsqueeze(0),
        attn_mask=mask_TS,
        scale=heads.scale,
        enable_gqa=even,
    )[0].transpose(0, 1)


def with_sinks(
    k_KSP: torch.Tensor, v_KSP: torch.Tensor, mask_TS: torch.Tensor | None, sinks_H: torch.Tensor, num_new: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a zero key and value, and return them with an additive mask, (H, T, S + 1), that gives this key each head's sink logit."""
    num_seen = k_KSP.shape[1]
    logits_HTS = torch.zeros(len(sinks_H), num_new, num_seen + 1, dtype=k_KSP.dtype, device=k_KSP.device)
    if mask_TS is not None:
        logits_HTS[:, :, :num_seen].masked_fill_(~mask_TS, float("-inf"))
    logits_HTS[:, :, num_seen] = sinks_H.to(logits_HTS.dtype).unsqueeze(1)
    return F.pad(k_KSP, (0, 0, 0, 1)), F.pad(v_KSP, (0, 0, 0, 1)), logits_HTS
