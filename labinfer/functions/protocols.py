"""Protocols of the core's functions; those of further layers and of quantized weights are in ``family_protocols.py``.

``reference/`` defines in plain torch what each function computes. Implementations of other providers give equal results up to
rounding, for every size. Activations are in the model's dtype (any float type) and on the rank's device; integers are int64. Shape
letters are those of docs/structure.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads, QKVHeads
from labinfer.functions.draw import Draw
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.packed_weight import PackedWeight


class PackWeight(Protocol):
    """Convert a loaded matrix to the weight layout that ``Linear`` and ``Embedding`` read; called once per matrix."""

    def __call__(self, weight_OI: torch.Tensor) -> PackedWeight:
        """Pack ``weight_OI``, contiguous, in the model's dtype. The caller gives the tensor up: the packed weight may reuse its memory."""


class Linear(Protocol):
    """Matrix product."""

    def __call__(self, x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: (T, I) → (T, O) in x's dtype. ``x`` need not be contiguous; the bias is in x's dtype."""


class GatedLinear(Protocol):
    """``Linear`` fused with the activation of a gated MLP; bit-identical to ``Linear`` followed by the activation."""

    def __call__(
        self, x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None, *, gelu: bool = False
    ) -> torch.Tensor:
        """``GeluAndMul`` of ``Linear`` if ``gelu``, else ``SiluAndMul`` of ``Linear``: (T, I) → (T, O / 2)."""


class Embedding(Protocol):
    """Token embedding from this rank's slice of the vocabulary."""

    def __call__(self, token_ids_T: torch.Tensor, table: PackedWeight, first: int) -> torch.Tensor:
        """(T,) int64 → (T, D) in the table's dtype. The rank's slice begins at id ``first``; ids outside of it give zeros."""


class AddRMSNorm(Protocol):
    """RMSNorm with residual addition in one pass (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __call__(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + delta`` and its norm, both (T, D); ``hidden`` itself if ``delta_TD`` is None. ``hidden_TD`` may be overwritten.

        The mean square is computed in float32. If ``weight_D`` has the dtype of ``hidden_TD``, the normalized values are rounded to
        that dtype before the multiplication. If it is float32, only the product is rounded.
        """


class SiluAndMul(Protocol):
    """SiLU activation of a gated MLP (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

    def __call__(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``; gate and up are the halves of a row: (T, 2F) → (T, F)."""


class GeluAndMul(Protocol):
    """Activation of a gated MLP with the tanh approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    def __call__(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up``; gate and up are the halves of a row: (T, 2F) → (T, F)."""


class RotateAndWrite(Protocol):
    """Rotary position embedding of queries and keys (Su et al. 2021, arXiv:2104.09864), fused with the write to the KV cache."""

    def __call__(
        self, qkv_THP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, angles: Angles | None, heads: QKVHeads
    ) -> torch.Tensor:
        """Rotated queries, (T, H, P).

        Args:
            qkv_THP: (T, H + 2K, P): query heads of each token, then its key heads, then its value heads; contiguous.
            angles: for the first R dimensions of a head; the others are not rotated. None without position encoding
                (Kazemnejad et al. 2023, arXiv:2305.19466).
            cache: keys and values are stored in its dtype.
            slots_T: int64, cache slot of each token: block × block size + offset.
        """


class PagedAttention(Protocol):
    """Causal attention of new tokens over the cached context of their sequences (Kwon et al. 2023, arXiv:2309.06180)."""

    def __call__(
        self, q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads
    ) -> torch.Tensor:
        """(T, H, P) → (T, H, P). The output and the arithmetic are in the dtype of the queries.

        Args:
            q_THP: rotated queries.
            cache: already holds the new tokens' keys and values; any of the cache's dtypes.
        """


class Argmax(Protocol):
    """Greedy sampling."""

    def __call__(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Id of each row's largest logit, (B,) int64. Ties go to the lowest id; in a row with NaN, the first NaN counts as largest."""


class Sample(Protocol):
    """Random sampling with a counter-based generator: equal logits and ``Draw`` give an equal token in any batch."""

    def __call__(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Token id of each draw: temperature, then the candidate filters, then Gumbel noise on the remaining logits, in float64.

        If a row's largest logit is NaN or infinite, its token is returned without a random draw.
        """
