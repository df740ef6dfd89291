"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434) over a paged cache, expanded and absorbed.

A head's key for a token is the head's key rows of ``weight`` times the token's latent, followed by the rotated part, which all heads
share. Its value is the head's value rows times the latent. The *expanded* form computes keys and values for the whole context. The
*absorbed* form multiplies each query with the key rows once, attends over the latents as the keys and values of a single KV head, and
multiplies the weighted sum of latents with the value rows at the end. A query-key pair takes several times as many operations absorbed
as expanded. But to expand the key and value of a context token takes as many operations as L pairs (512 in DeepSeek's models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.dispatch import BySequence
from labinfer.functions.latent_cache import LatentCache, LatentTransform
from labinfer.functions.reference.elementwise import rms_norm, rotary

MOST_BYTES = 64 * 2**20
"""Maximum bytes of the keys and values expanded at once, or of the absorbed queries' mask; one head or token may exceed it."""


def write_latent(
    q_THQ: torch.Tensor,
    kv_TC: torch.Tensor,
    cache: LatentCache,
    slots_T: torch.Tensor,
    angles: Angles,
    *,
    transform: LatentTransform,
) -> torch.Tensor:
    """Rotate the last dimensions of queries and keys, normalize the latents, and store latents and keys."""
    rotated, interleaved = angles[0].shape[1], transform.interleaved
    latent_TL, key_TR = kv_TC[:, :-rotated], kv_TC[:, -rotated:]
    cache.latents.store(rms_norm(latent_TL, transform.norm_L, transform.eps), slots_T)
    cache.keys.store(rotary(key_TR.unsqueeze(1), *angles, interleaved).squeeze(1), slots_T)
    q_THR = rotary(q_THQ[..., -rotated:], *angles, interleaved)
    return torch.cat((q_THQ[..., :-rotated], q_THR), dim=-1)


def absorbed(
    q_THQ: torch.Tensor, cache: LatentCache, batch: AttentionBatch, weight_HUL: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention in the absorbed form: each query is multiplied with the key rows, and attends to latents."""
    q_HTN, q_THR, weight_HNL, weight_HPL = _parts(q_THQ, cache, weight_HUL)
    q_THC = torch.cat((torch.bmm(q_HTN, weight_HNL).transpose(0, 1), q_THR), dim=-1)
    sums_THC, num_heads = torch.empty_like(q_THC), q_THC.shape[1]
    for rows, latent_SL, key_SR in _sequences(cache, batch, q_THQ.dtype):
        cached_1SC, num_seen, num_new = (
            torch.cat((latent_SL, key_SR), dim=1)[None],
            len(latent_SL),
            rows.stop - rows.start,
        )
        mask_TS = _causal_mask(num_new, num_seen, q_THQ.device) if num_new > 1 else None
        step = max(1, MOST_BYTES // (num_heads * num_seen * torch.float32.itemsize))
        for first in range(0, num_new, step):
            some = slice(rows.start + first, min(rows.start + first + step, rows.stop))
            mask = None if mask_TS is None else mask_TS[first : first + step].repeat_interleave(num_heads, dim=0)
            # All heads of all tokens become queries of a single head, so that each latent is read once for all of them.
            sums_THC[some] = F.scaled_dot_product_attention(
                q_THC[some].reshape(1, 1, -1, q_THC.shape[2]),
                cached_1SC[None],
                cached_1SC[None],
                attn_mask=mask,
                scale=scale,
            ).view_as(q_THC[some])
    sums_HTL = sums_THC[..., : cache.rank].transpose(0, 1)
    return torch.bmm(sums_HTL, weight_HPL.transpose(1, 2)).transpose(0, 1).contiguous()


def expanded(
    q_THQ: torch.Tensor, cache: LatentCache, batch: AttentionBatch, weight_HUL: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention in the expanded form: keys and values are computed from latents, a few heads at a time."""
    _, q_THR, weight_HNL, weight_HPL = _parts(q_THQ, cache, weight_HUL)
    num_heads, nope, size = q_THQ.shape[1], weight_HNL.shape[1], weight_HPL.shape[1]
    width = max(q_THQ.shape[2], size)  # torch's attention is fast if queries and values have equal width
    out_THP = q_THQ.new_empty(len(q_THQ), num_heads, size)
    for rows, latent_SL, key_SR in _sequences(cache, batch, q_THQ.dtype):
        num_seen, num_new = len(latent_SL), rows.stop - rows.start
        mask_TS = _causal_mask(num_new, num_seen, q_THQ.device)
        step = max(1, MOST_BYTES // (2 * num_seen * width * q_THQ.dtype.itemsize))
        for first in range(0, num_heads, step):
            heads = slice(first, min(first + step, num_heads))
            both_HSU = F.linear(latent_SL, weight_HUL[heads].flatten(0, 1)).unflatten(1, (heads.stop - first, -1))
            k_HSN, v_HSP = both_HSU.transpose(0, 1).split([nope, size], dim=-1)
            k_HSQ = torch.cat((k_HSN, key_SR.expand(len(k_HSN), -1, -1)), dim=-1)
            attended_HTP = F.scaled_dot_product_attention(
                *(_widen(x, width).unsqueeze(0) for x in (q_THQ[rows, heads].transpose(0, 1), k_HSQ, v_HSP)),
                attn_mask=mask_TS,
                scale=scale,
            )[0, ..., :size]
            out_THP[rows, heads] = attended_HTP.transpose(0, 1)
    return out_THP


def fewest_operations(num_new: int, weight_HUL: torch.Tensor, scale: float) -> Callable[..., torch.Tensor]:
    """The form with fewer operations for ``num_new`` new tokens of a sequence; independent of the context length.

    For each head, a query-key pair takes ``2 L`` operations absorbed and ``U`` expanded, without the rotated part; to expand the key and
    value of a token takes ``L U``.
    """
    unit, rank = weight_HUL.shape[1:]
    return expanded if num_new * (2 * rank - unit) > rank * unit else absorbed


latent_attention = BySequence(fewest_operations)
"""The form with fewer operations, chosen for each sequence."""


def _parts(
    q_THQ: torch.Tensor, cache: LatentCache, weight_HUL: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unrotated and rotated part of the queries, (H, T, N) and (T, H, R); key rows, (H, N, L), and value rows, (H, P, L), of the weight."""
    rotated = _rotated(cache)
    nope = q_THQ.shape[2] - rotated
    return q_THQ[..., :nope].transpose(0, 1), q_THQ[..., nope:], weight_HUL[:, :nope], weight_HUL[:, nope:]


def _rotated(cache: LatentCache) -> int:
    return cache.latent.shape[2] - cache.rank


def _sequences(
    cache: LatentCache, batch: AttentionBatch, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows of each sequence, and its cached context: latents (S, L) and rotated parts of keys (S, R)."""
    for b, length in enumerate(batch.context_lens):
        blocks = batch.tables_N[batch.table_ptr[b] : batch.table_ptr[b + 1]]
        yield (
            slice(batch.row_ptr[b], batch.row_ptr[b + 1]),
            cache.latents.load(blocks, dtype)[:length],
            cache.keys.load(blocks, dtype)[:length],
        )


def _causal_mask(num_new: int, num_seen: int, device: torch.device) -> torch.Tensor:
    return torch.ones(num_new, num_seen, dtype=torch.bool, device=device).tril(num_seen - num_new)


def _widen(x_HSP: torch.Tensor, width: int) -> torch.Tensor:
    """Zero-pad the last dimension to ``width``."""
    return x_HSP if x_HSP.shape[-1] == width else F.pad(x_HSP, (0, width - x_HSP.shape[-1]))
