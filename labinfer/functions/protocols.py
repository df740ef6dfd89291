"""A protocol for every function of the core; those of further layers and of quantized weights are in ``family_protocols.py``.

``reference/`` says what each computes, in plain torch; implementations of other providers give the same up to rounding, for
every size. Activations are in the model's dtype, any float type, and on the rank's device; integers are int64. Letters of
shapes are those of docs/structure.md.
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
    """Bring a loaded matrix into the layout in which ``Linear`` and ``Embedding`` read it; called once for each."""

    def __call__(self, weight_OI: torch.Tensor) -> PackedWeight:
        """(O, I) in the model's dtype, contiguous. It is given up: its memory may be the packed one's."""


class Linear(Protocol):
    """Matrix product."""

    def __call__(self, x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: (T, I) → (T, O) in x's dtype. ``x`` need not be contiguous; the bias is in x's dtype."""


class GatedLinear(Protocol):
    """``Linear`` and the activation of a gated MLP after it in one pass, to the same bits."""

    def __call__(
        self, x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None, *, gelu: bool = False
    ) -> torch.Tensor:
        """``SiluAndMul`` of ``Linear``, or ``GeluAndMul``: (T, I) → (T, O / 2)."""


class Embedding(Protocol):
    """Rows of this rank's slice of the vocabulary."""

    def __call__(self, token_ids_T: torch.Tensor, table: PackedWeight, first: int) -> torch.Tensor:
        """(T,) int64 → (T, D) in the table's dtype; the slice begins at id ``first``, ids outside of it give zeros."""


class AddRMSNorm(Protocol):
    """Residual addition and root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467) in one pass."""

    def __call__(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + delta`` and its norm, both (T, D); without a delta ``hidden`` as it is. ``hidden`` may be overwritten.

        The mean square is taken in float32. The weight is in the dtype of ``hidden``, to which what it multiplies is rounded
        first, or in float32, where only the result is rounded.
        """


class SiluAndMul(Protocol):
    """Activation of a gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    def __call__(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of the two halves: (T, 2F) → (T, F)."""


class GeluAndMul(Protocol):
    """Activation of a gated MLP with the GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) by its tanh form."""

    def __call__(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` of the two halves: (T, 2F) → (T, F)."""


class RotateAndWrite(Protocol):
    """Positions for queries and keys (Su et al. 2021, arXiv:2104.09864), and keys and values into the cache."""

    def __call__(
        self, qkv_THP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, angles: Angles | None, heads: QKVHeads
    ) -> torch.Tensor:
        """Rotated queries, (T, H, P).

        Args:
            qkv_THP: (T, H + 2K, P): a token's query heads, then its KV heads' keys, then their values; contiguous.
            angles: for the first R dimensions of a head; the others stay as they are. None where positions are not encoded
                (Kazemnejad et al. 2023, arXiv:2305.19466).
            cache: keys and values are stored in its dtype.
            slots_T: int64, where each token's keys and values go: block × block size + offset.
        """


class PagedAttention(Protocol):
    """Causal attention of new tokens over everything their sequences have cached (Kwon et al. 2023, arXiv:2309.06180)."""

    def __call__(
        self, q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads
    ) -> torch.Tensor:
        """(T, H, P) → (T, H, P) in the dtype of the queries, in which the arithmetic is, too.

        Args:
            q_THP: rotated queries.
            cache: with the new tokens' keys and values written already, in any dtype that it may have.
        """


class Argmax(Protocol):
    """Greedy choice."""

    def __call__(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Id of each row's largest logit, (B,) int64; the lowest among equals, and the first NaN where there is one."""


class Sample(Protocol):
    """Random choice, from a counter: the same numbers give the same token in any batch."""

    def __call__(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """The token of each draw: temperature, then the candidate sets, then Gumbel noise on what is left, in float64.

        Where the largest logit of a row is no finite number (NaN, or infinite), nothing can be weighed against it: it is
        taken.
        """
