"""Protocols of the functions that only ``models/families`` and quantized weights call; see ``protocols.py``."""

from __future__ import annotations

from typing import Protocol

import torch

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.latent_cache import LatentCache, LatentTransform
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape, PackedExperts
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.routing_rule import RouterWeights
from labinfer.weights.codes import Codes


class PackCodes(Protocol):
    """Convert quantized weights of a checkpoint to the weight layout that ``Linear`` reads, without quantizing them again."""

    def __call__(self, codes: Codes, dtype: torch.dtype) -> PackedWeight:
        """Pack ``codes`` as a matrix (outputs, inputs) of ``dtype``; may take over the memory of ``codes``.

        Group scales and minima may be stored in float16, times one power of two for the matrix: those with at most 11 significant
        bits stay exact. Power-of-two scales of a code table may be stored as exponents.
        """


class WriteLatent(Protocol):
    """Rotary position embedding of latent attention's queries and keys (DeepSeek-AI 2024, arXiv:2405.04434), fused with the
    write of latents and keys to the cache."""

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
        """Queries with their last R dimensions rotated, (T, H, Q), contiguous; may reuse the memory of ``q_THQ``.

        Args:
            kv_TC: each token's latent (L), then the rotary part of its key (R), C = L + R; rows may be strided.
            cache: normalized latents and rotated keys are stored in its dtype.
            slots_T: int64, block × block size + offset.
        """


class LatentAttention(Protocol):
    """Causal attention of new tokens over the cached latents of their sequences (DeepSeek-AI 2024, arXiv:2405.04434).

    A token's key for head h is ``weight[h, :N] @ latent`` followed by the rotated part, its value ``weight[h, N:] @ latent``,
    N = Q - R. The implementation may compute keys and values (expanded) or multiply the weights with the queries (absorbed).
    """

    def __call__(
        self, q_THQ: torch.Tensor, cache: LatentCache, batch: AttentionBatch, weight_HUL: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """(T, H, Q) → (T, H, P) in the dtype of the queries, contiguous.

        Args:
            q_THQ: queries, their last R dimensions rotated.
            cache: already holds the new tokens' latents and keys; any of the cache's dtypes.
            weight_HUL: N rows for keys and P rows for values of each head; in the dtype of the queries.
            scale: factor on the attention scores.
        """


class CausalConv(Protocol):
    """Causal depthwise convolution followed by SiLU, with a state per sequence."""

    def __call__(
        self,
        x_TC: torch.Tensor,
        weight_WC: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        bias_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, C) → (T, C) in x's dtype, contiguous.

        Args:
            x_TC: rows may be strided.
            weight_WC: float32; the last row is the tap of the current token, earlier rows those of the tokens before it.
            state: (slots, W - 1, C) in x's dtype: the last inputs of each sequence, the newest one last. Updated in place.
            batch: with ``state_slots_B``.
            bias_C: float32; added before SiLU.
        """


class DeltaRule(Protocol):
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464): linear attention with an error-correcting state update.

    For the float32 state S (key size × value size) of a value head: ``S *= exp(-rate * softplus(a + bias))``;
    ``S += k (v - k S) sigmoid(b)``; the output is ``q S``. Queries and keys are L2-normalized; queries are also divided by the
    square root of the key size.
    """

    def __call__(
        self,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        """Outputs of the value heads, (T, H, P) in the dtype of ``qkv_TC``.

        Args:
            qkv_TC: query heads of each token, as many key heads, then H value heads, C columns in all; contiguous.
            gates_TG: b of each value head, then a of each value head, G = 2H; contiguous.
            state: (slots, H, key size, P) float32. Updated in place.
            batch: with ``state_slots_B``.
        """


class GatedNorm(Protocol):
    """RMS norm of each head, times a SiLU gate."""

    def __call__(self, x_THP: torch.Tensor, gate_THP: torch.Tensor, weight_P: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight * silu(gate)``, (T, H, P) in x's dtype.

        Args:
            x_THP: contiguous.
            gate_THP: the heads of a token are contiguous; the token dimension may be strided.
            weight_P: in x's dtype.
        """


class SelectiveScan(Protocol):
    """Recurrence of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) with one state matrix per head.

    For the float32 state S (N × P) of a head, with ``dt = clamp(softplus(dt + bias), min_dt, max_dt)``:
    ``S = exp(-rate * dt) S + B (dt x)``, an outer product; the output is ``C S + skip * x``. All arithmetic is in float32.
    """

    def __call__(
        self,
        xbc_TC: torch.Tensor,
        dt_TH: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        heads: MambaHeads,
    ) -> torch.Tensor:
        """Outputs of the heads, (T, H, P) in the dtype of ``xbc_TC``.

        Args:
            xbc_TC: x of the H heads of each token (P values each), then B of each group (N values each), then C of each group;
                contiguous.
            dt_TH: time step of each head before bias and softplus, in the dtype of ``xbc_TC``; rows may be strided.
            state: (slots, H, N, P) float32. Updated in place.
            batch: with ``state_slots_B``.
        """


class GatedGroupNorm(Protocol):
    """SiLU gate, then RMS norm over groups of channels."""

    def __call__(
        self, x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, num_groups: int, eps: float
    ) -> torch.Tensor:
        """``v / rms(v) * weight`` for ``v = x * silu(gate)`` in float32, (T, D) in x's dtype.

        Args:
            x_TD: contiguous.
            gate_TD: rows may be strided.
            weight_D: in x's dtype.
            num_groups: number of consecutive groups of D / ``num_groups`` channels; each has its own RMS.
        """


class Route(Protocol):
    """Router of a mixture of experts: the experts of each token."""

    def __call__(
        self, x_TD: torch.Tensor, router: RouterWeights, num_tokens_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids of each token, (T, A) int64, and their weights, (T, A) float32; scores are ``x @ weight.T`` in float32.

        Args:
            num_tokens_E: int64, tokens per expert; incremented in place.
        """


class MakeExperts(Protocol):
    """Allocate a rank's experts of a layer in the weight layout that ``Experts`` reads."""

    def __call__(
        self, shape: ExpertShape, device: torch.device, *, data_EB: torch.Tensor | None = None
    ) -> PackedExperts:
        """Experts without weights yet; ``PackedExperts.pack`` or ``pack_codes`` fills them one by one.

        Args:
            shape: ``shape.form``, if any, has the bit width of this implementation's quantization.
            data_EB: experts that are already packed, as ``PackedExperts.data_EB`` of this implementation returns them; None to
                allocate memory, and for implementations whose ``data_EB`` is None.
        """


class Experts(Protocol):
    """Routed experts of a mixture, each a gated MLP (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961)."""

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_TA: torch.Tensor, weights_TA: torch.Tensor, mlps: ExpertMLPs
    ) -> torch.Tensor:
        """``sum over a of weights[t, a] * down(silu(gate(x[t])) * up(x[t]))`` of expert ``ids[t, a]``: (T, D) in x's dtype.

        A token's experts are summed in float32 in the order of their ids, so the sum does not depend on the batch.

        Args:
            expert_ids_TA: int64, distinct within a token; ids outside of ``mlps.first`` … ``mlps.first + E - 1`` add nothing.
            weights_TA: float32.
        """
