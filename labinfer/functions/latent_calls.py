"""Function calls of a latent-attention layer, for timing; see ``calls``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labinfer.functions.calls import CONTEXT, CallSetting, Work
from labinfer.functions.family_protocols import LatentAttention, WriteLatent
from labinfer.functions.latent_cache import LatentCache, LatentTransform
from labinfer.functions.layer_cache import SCALE_DTYPE


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Head sizes of a layer on this rank."""

    heads: int
    rank: int
    """Size of a latent, L."""
    rotated: int
    """Rotary dimensions of a key, R."""
    unrotated: int
    """Dimensions of a head's key without position encoding, N."""
    value_size: int

    @property
    def query_size(self) -> int:
        return self.unrotated + self.rotated

    def cache(self, num_blocks: int, setting: CallSetting) -> LatentCache:
        """A latent cache of zeros."""
        shape, device = (num_blocks, setting.block_size), setting.device
        latent, scale = torch.zeros(*shape, self.rank + self.rotated, dtype=setting.kv_dtype, device=device), None
        if setting.kv_dtype == torch.int8:
            scale = torch.zeros(*shape, 2, dtype=SCALE_DTYPE, device=device)
        return LatentCache(latent=latent, latent_scale=scale, rank=self.rank)


@dataclass(frozen=True, kw_only=True)
class WriteLatentCall(LatentSizes):
    """A call of ``write_latent`` with this rank's heads."""

    interleaved: bool = False
    target = "write_latent"

    def bind(self, function: WriteLatent, rows: int, setting: CallSetting) -> Callable[[], object]:
        q_THQ = setting.random(rows, self.heads, self.query_size)
        kv_TC, angles_TR = setting.random(rows, self.rank + self.rotated), setting.random(rows, self.rotated)
        slots_T = setting.slots(rows)
        cache = self.cache(setting.blocks_for(int(slots_T.max()) + 1), setting)
        setting.fill([cache.latents, cache.keys])
        transform = LatentTransform(setting.random(self.rank), 1e-6, self.interleaved)
        return lambda: function(q_THQ, kv_TC, cache, slots_T, (angles_TR, angles_TR), transform=transform)

    def work(self, rows: int, setting: CallSetting) -> Work:
        numbers = self.heads * self.query_size + self.rank + self.rotated
        return Work(2 * rows * numbers * setting.dtype.itemsize, 0)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionCall(LatentSizes):
    """``latent_attention`` of this rank's heads on one sequence: implementations are chosen by the number of new tokens of a sequence."""

    target = "latent_attention"

    def bind(self, function: LatentAttention, rows: int, setting: CallSetting) -> Callable[[], object]:
        batch = setting.batch([rows])
        cache = self.cache(int(batch.tables_N.max()) + 1, setting)
        setting.fill([cache.latents, cache.keys], batch)
        q_THQ = setting.random(rows, self.heads, self.query_size)
        weight_HUL = setting.random(self.heads, self.unrotated + self.value_size, self.rank)
        return lambda: function(q_THQ, cache, batch, weight_HUL, self.query_size**-0.5)

    def work(self, rows: int, setting: CallSetting) -> Work:
        """Work of the cheaper form of latent attention (absorbed or expanded) for ``rows`` tokens."""
        unit, pairs = self.unrotated + self.value_size, rows * CONTEXT + rows * (rows + 1) // 2
        absorbed = pairs * (2 * self.rank + self.rotated) + rows * unit * self.rank
        expanded = pairs * (unit + self.rotated) + (CONTEXT + rows) * unit * self.rank
        cached = (CONTEXT + rows) * (self.rank + self.rotated) * setting.kv_dtype.itemsize
        activations = rows * self.heads * (self.query_size + self.value_size) * setting.dtype.itemsize
        weight = self.heads * unit * self.rank * setting.dtype.itemsize
        return Work(cached + activations + weight, 2 * self.heads * min(absorbed, expanded))
