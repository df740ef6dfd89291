"""Protocols of the functions that only layers of ``models/families`` and quantized weights call; see ``protocols.py``."""

from __future__ import annotations

from typing import Protocol

import torch

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.latent_cache import LatentCache, LatentTransform
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape, PackedExperts
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.routing_rule import RouterWeights
from labinfer.weights.codes import Codes


class PackCodes(Protocol):
    """Bring whole numbers of a checkpoint into the layout in which ``Linear`` reads them, none of them rounded again."""

    def __call__(self, codes: Codes, dtype: torch.dtype) -> PackedWeight:
        """Pack ``codes`` as a matrix of ``dtype``, (outputs, inputs); may take over their memory.

        Scales and minima of groups are held in float16 times a power of two of the matrix: those with 11 bits or fewer stay as they
        are. Scales of a table's numbers that are powers of two may be held as exponents.
        """


class WriteLatent(Protocol):
    """Positions for queries and keys of latent attention (DeepSeek-AI 2024, arXiv:2405.04434), and both into the cache."""

    def __call__(
        self,
        q_THQ: torch.Tensor,
        kv_TC: torch.Tensor,
        cache: LatentCache,
        slots_T: torch.Tensor,
        angles: Angles,
        *,
        transform: LatentTransform,
    ) -> torch.Tensor:
        """Queries whose last R dimensions are rotated, (T, H, Q), contiguous; the memory of ``q_THQ`` may be used for them.

        Args:
            kv_TC: each token's latent (L) and the part of its key that is rotated (R), C numbers; rows may be further apart.
            cache: normalised latents and rotated parts of keys are stored in its dtype.
            slots_T: int64, block × block size + offset.
        """


class LatentAttention(Protocol):
    """Causal attention of new tokens over the latents of their sequences (DeepSeek-AI 2024, arXiv:2405.04434).

    The key of head h for a token is ``weight[h, :N] @ latent`` with the rotated part behind it, its value ``weight[h, N:] @
    latent``, N = Q - R. Whether these are computed, or the weights go to the queries' side, is up to the implementation.
    """

    def __call__(
        self, q_THQ: torch.Tensor, cache: LatentCache, batch: AttentionBatch, weight_HUL: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """(T, H, Q) → (T, H, P) in the dtype of the queries, contiguous.

        Args:
            q_THQ: with their last R dimensions rotated.
            cache: with the new tokens written already, in any dtype that it may have.
            weight_HUL: rows for keys, N, and for values, P, of each head; in the dtype of the queries.
            scale: factor on the scores.
        """


class CausalConv(Protocol):
    """Depthwise convolution over a token and those before it, then SiLU, as layers with a state have it in front of them."""

    def __call__(
        self, x_TC: torch.Tensor, weight_WC: torch.Tensor, state: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """(T, C) → (T, C) in x's dtype, contiguous.

        Args:
            x_TC: rows may be further apart than C.
            weight_WC: float32; the last row is multiplied with the token itself, those above with the tokens before it.
            state: (slots, W - 1, C) in x's dtype: the last inputs of each sequence, the newest one last. Brought up to date.
            batch: with ``state_slots_B``.
        """


class DeltaRule(Protocol):
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464): linear attention that corrects what its state has for a key.

    With the state S (key size × value size) of a value head, in float32: ``S *= exp(-rate * softplus(a + bias))``;
    ``S += k (v - k S) sigmoid(b)``; the output is ``q S``. Queries and keys are divided by their length, queries also by the
    root of their size.
    """

    def __call__(
        self,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        """(T, H, P) in the dtype of qkv.

        Args:
            qkv_TC: a token's query heads, as many key heads, then its H value heads, C numbers in all; contiguous.
            gates_TG: b of each value head, then a of each, G = 2H; contiguous.
            state: (slots, H, key size, P) float32. Brought up to date.
            batch: with ``state_slots_B``.
        """


class GatedNorm(Protocol):
    """Root-mean-square normalisation of each head, times a gate."""

    def __call__(self, x_THP: torch.Tensor, gate_THP: torch.Tensor, weight_P: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight * silu(gate)``, (T, H, P) in x's dtype.

        Args:
            x_THP: contiguous.
            gate_THP: a token's heads follow each other; tokens may be further apart.
            weight_P: in x's dtype.
        """


class Route(Protocol):
    """The experts of a mixture that each token is sent to."""

    def __call__(
        self, x_TD: torch.Tensor, router: RouterWeights, num_tokens_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each token, (T, A) int64, and their weights, (T, A) float32, by scores in float32 of ``x @ weight.T``.

        Args:
            num_tokens_E: int64, grows by the tokens that each expert is given.
        """


class MakeExperts(Protocol):
    """Memory for the experts that a rank holds of a layer, in the layout in which ``Experts`` reads them."""

    def __call__(
        self, shape: ExpertShape, device: torch.device, *, data_EB: torch.Tensor | None = None
    ) -> PackedExperts:
        """Experts without weights yet; ``PackedExperts.pack`` or ``pack_codes`` brings them in one by one.

        Args:
            shape: its codes, if any, have the bits of the quantization of these functions.
            data_EB: experts that are packed already, as ``PackedExperts.data_EB`` of the same functions has them; only where
                that is not None.
        """


class Experts(Protocol):
    """The chosen experts of a mixture, each a gated MLP (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021,
    arXiv:2101.03961)."""

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_TA: torch.Tensor, weights_TA: torch.Tensor, mlps: ExpertMLPs
    ) -> torch.Tensor:
        """``sum over a of weights[t, a] * down(silu(gate(x[t])) * up(x[t]))`` of expert ``ids[t, a]``: (T, D) in x's dtype.

        A token's experts are added in float32 in the order of their ids, so its sum does not depend on the batch.

        Args:
            expert_ids_TA: int64, different within a token; those outside of ``mlps.first`` … ``mlps.first + E - 1`` add nothing.
            weights_TA: float32.
        """
