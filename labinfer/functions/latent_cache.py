"""``LatentCache``: what tokens leave in a layer of latent attention, one vector each for all heads; and ``LatentTransform``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.functions.layer_cache import TokenPool


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """The pool of one layer: a token's latent, and behind it the key's rotated part, which has a scale of its own in int8."""

    latent: torch.Tensor
    """(blocks, block size, L + R)."""
    latent_scale: torch.Tensor | None = None
    """(blocks, block size, 2) in ``SCALE_DTYPE``: of the latent and of the rotated part; None unless int8."""
    rank: int
    """Size of the latent, L."""

    @property
    def block_size(self) -> int:
        return self.latent.shape[1]

    @property
    def latents(self) -> TokenPool:
        """The normalised latents, (L)."""
        return self._part(0, 0, self.rank)

    @property
    def keys(self) -> TokenPool:
        """The rotated parts of the keys, (R)."""
        return self._part(1, self.rank, self.latent.shape[2])

    def _part(self, index: int, begin: int, end: int) -> TokenPool:
        scale = None if self.latent_scale is None else self.latent_scale[..., index]
        return TokenPool(self.latent[..., begin:end], scale)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are: a block is its rows of each of them."""
        return (self.latent,) if self.latent_scale is None else (self.latent, self.latent_scale)


@dataclass(frozen=True, slots=True)
class LatentTransform:
    """Norm of a layer's latents and rotation of its keys, the same in every step, as ``WriteLatent`` is given them."""

    norm_L: torch.Tensor
    """Weight of the root-mean-square norm of latents."""
    eps: float
    """Constant of that norm."""
    interleaved: bool = False
    """Whether the pairs of dimensions that are rotated are (2i, 2i + 1) instead of (i, i + R/2)."""
