"""``LatentCache``: the paged cache of one latent-attention layer, one vector per token for all heads; and ``LatentTransform``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.functions.layer_cache import TokenPool


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """The pool of one layer: each token's latent followed by the rotary part of its key. In int8 the two parts have separate scales."""

    latent: torch.Tensor
    """Latents and rotary keys, (blocks, block size, L + R)."""
    latent_scale: torch.Tensor | None = None
    """(blocks, block size, 2) in ``SCALE_DTYPE``: scale of the latent and of the rotary part; None unless int8."""
    rank: int
    """Size of the latent, L."""

    @property
    def block_size(self) -> int:
        return self.latent.shape[1]

    @property
    def latents(self) -> TokenPool:
        """Pool of the normalized latents, an entry (L) per token."""
        return self._part(0, 0, self.rank)

    @property
    def keys(self) -> TokenPool:
        """Pool of the rotary parts of the keys, an entry (R) per token."""
        return self._part(1, self.rank, self.latent.shape[2])

    def _part(self, index: int, begin: int, end: int) -> TokenPool:
        scale = None if self.latent_scale is None else self.latent_scale[..., index]
        return TokenPool(self.latent[..., begin:end], scale)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the cache; block i is slice i of each."""
        return (self.latent,) if self.latent_scale is None else (self.latent, self.latent_scale)


@dataclass(frozen=True, slots=True)
class LatentTransform:
    """Norm of a layer's latents and rotation of its keys; constant argument of ``WriteLatent``."""

    norm_L: torch.Tensor
    """Weight of the latents' RMS norm."""
    eps: float
    """Epsilon of the latents' RMS norm."""
    interleaved: bool = False
    """Whether rope rotates the interleaved pairs of dimensions (2i, 2i + 1) instead of (i, i + R/2)."""
