"""Compiled latent attention, always in the absorbed form, so that the number of new tokens does not change the bits of a result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.cpu.floats import DTYPES
from labinfer.functions.cpu.library import Library
from labinfer.functions.latent_cache import LatentCache, LatentTransform


class CpuLatent:
    """Each method implements the function of equal name; ``family_protocols`` documents the arguments.

    Args:
        library: see ``library.load``.
        kernel: kernel of bfloat16 products, one of ``library.kernels``.
    """

    dtypes = (torch.bfloat16, torch.float32, torch.float16)

    def __init__(self, library: Library, kernel: str = ""):
        self._library = library
        self._attend = library.find("attend_latent", kernel)

    def calls(self) -> dict[str, Callable]:
        """Function name → method of this object that implements the function."""
        return {"write_latent": self.write_latent, "latent_attention": self.latent_attention}

    def write_latent(
        self,
        q_THQ: torch.Tensor,
        kv_TC: torch.Tensor,
        cache: LatentCache,
        slots_T: torch.Tensor,
        angles: Angles,
        *,
        transform: LatentTransform,
    ) -> torch.Tensor:
        q_THQ, (cos_TR, sin_TR) = q_THQ.contiguous(), angles
        self._library.find_typed("write_latent", q_THQ.dtype)(
            q_THQ.data_ptr(),
            kv_TC.data_ptr(),
            cos_TR.data_ptr(),
            sin_TR.data_ptr(),
            transform.norm_L.data_ptr(),
            slots_T.data_ptr(),
            *_addresses(cache),
            *q_THQ.shape,
            cache.rank,
            cos_TR.shape[1],
            kv_TC.stride(0),
            transform.eps,
            transform.interleaved,
            DTYPES.index(cache.latent.dtype),
            torch.get_num_threads(),
        )
        return q_THQ

    def latent_attention(
        self, q_THQ: torch.Tensor, cache: LatentCache, batch: AttentionBatch, weight_HUL: torch.Tensor, scale: float
    ) -> torch.Tensor:
        width, rank = cache.latent.shape[2], cache.rank
        q_THQ, threads = q_THQ.contiguous(), torch.get_num_threads()
        tokens, heads, size = q_THQ.shape
        rotated, unit = width - rank, weight_HUL.shape[1]
        sizes = (tokens, heads, size - rotated)
        q_THC, sums_THL = q_THQ.new_empty(tokens, heads, width), q_THQ.new_empty(tokens, heads, rank)
        self._library.find_typed("absorb_queries", q_THQ.dtype)(
            q_THQ.data_ptr(), weight_HUL.data_ptr(), q_THC.data_ptr(), *sizes, rotated, unit, rank, threads
        )
        self._attend(
            q_THC.data_ptr(),
            *_addresses(cache),
            batch.tables_N.data_ptr(),
            batch.table_ptr_B.data_ptr(),
            batch.row_ptr_B.data_ptr(),
            batch.context_lens_B.data_ptr(),
            sums_THL.data_ptr(),
            len(batch.context_lens),
            heads,
            width,
            rank,
            cache.block_size,
            DTYPES.index(q_THQ.dtype),
            DTYPES.index(cache.latent.dtype),
            scale,
            threads,
        )
        out_THP = q_THQ.new_empty(tokens, heads, unit - size + rotated)
        self._library.find_typed("expand_values", q_THQ.dtype)(
            sums_THL.data_ptr(), weight_HUL.data_ptr(), out_THP.data_ptr(), *sizes, unit, rank, threads
        )
        return out_THP


def _addresses(cache: LatentCache) -> tuple[int, int | None]:
    """Addresses of the latents and of their scales."""
    return cache.latent.data_ptr(), None if cache.latent_scale is None else cache.latent_scale.data_ptr()
