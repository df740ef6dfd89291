"""MiniMax-M3, text part (model card of MiniMaxAI/MiniMax-M3), with dense attention in place of its block-sparse attention."""

from __future__ import annotations

from typing import Any

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_layer_types, read_model
from labinfer.models.config_file import FULL, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.gpt_oss import read_clamped_gate
from labinfer.models.families.layers.clamped_mlp import ClampedMLPConfig
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.families.layers.unread_indexer import UnreadIndexer
from labinfer.models.layers.context import StageContext
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames

SPARSE_ATTENTION, DENSE, SPARSE = "minimax_m3_sparse", "dense", "sparse"
PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Names of an expert's matrices in the published checkpoint."""
INDEXER = ("q_proj", "k_proj", "q_norm", "k_norm")


class MiniMaxM3VLForCausalLM(Decoder):
    """Sigmoid-routed experts and a shared one in most layers; norms whose weights are stored minus 1. The names are Transformers'."""

    names = CheckpointNames(
        renamed={"mlp.shared_expert": "mlp.shared_experts"}, fused={("gate_proj", "up_proj"): "gate_up_proj"}
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = (
            file.text_part()
            .with_aliases(num_experts="num_local_experts")
            .with_defaults(head_dim=128, num_key_value_heads=4, max_position_embeddings=524288, rope_theta=5e6)
        )
        activation = file.get("hidden_act", str, "silu")
        file.require(
            activation in ("silu", "swigluoai"),
            f"hidden_act {activation!r:.60} is not supported; only silu and swigluoai are",
        )
        gate = read_clamped_gate(file, has_biases=False)

        def mlp(key: str, default: int) -> ClampedMLPConfig:
            return ClampedMLPConfig(intermediate_size=file.size(key, default), gate=gate)

        experts, chosen = file.size("num_local_experts", 128), file.size("num_experts_per_tok", 4)
        scale = file.get("routed_scaling_factor", float, 2.0)
        mixture = MixtureConfig(
            router=read_router(file, experts, chosen, scores="sigmoid", bias_dims=1, scale=scale),
            intermediate_size=file.size("intermediate_size"),
            shared=mlp("shared_intermediate_size", 3072),
            gate=gate,
        )
        mlps = {SPARSE: mixture, DENSE: mlp("dense_intermediate_size", 12288)}
        attention = read_attention(
            file.without("layer_types"),
            rope=read_rope(file, partial=True),
            qk_norm="head",
            qk_norm_eps=file.get("rms_norm_eps", float, 1e-6),
            qk_norm_offset=1.0,
            qkv_bias=False,
            out_bias=False,
        )
        types = _types(file, "mlp_layer_types", (DENSE, SPARSE), file.values.get("moe_layer_freq"), SPARSE)
        layers = [LayerConfig(mixer=attention, mlp=mlps[kind]) for kind in types]
        return read_model(file, layers, norm_offset=1.0, **_read_limit(file))

    def add_parts(self, config: ModelConfig, ctx: StageContext) -> None:
        for layer in self.model.layers.values():
            layer.self_attn.indexer = UnreadIndexer(INDEXER)


class MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLForCausalLM):
    """Text part of the published model."""

    names = CheckpointNames(
        renamed={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
            "mlp.experts": "block_sparse_moe.experts",
            **{f"mlp.{name}": f"mlp.{name}" for name in PROJECTIONS},
            **{f"mlp.shared_expert.{name}": f"block_sparse_moe.shared_experts.{name}" for name in PROJECTIONS},
            **PROJECTIONS,
            **{f"self_attn.indexer.{name}": f"self_attn.index_{name}" for name in INDEXER},
        },
        roots=("language_model.model", "model.language_model"),
        ignored=(
            *("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
            *("mtp.", "language_model.mtp.", "language_model.model.mtp."),
        ),
    )


def _read_limit(file: ConfigFile) -> dict[str, Any]:
    """Fields of the ``ModelConfig`` that limit contexts to the length in which sparse attention chooses all blocks, and so is dense."""
    sparse = file.get("sparse_attention_config", dict, {})
    names = {"index_topk_blocks": "sparse_topk_blocks", "index_block_size": "sparse_block_size"}
    file = file.with_values(file.values | {new: sparse[old] for new, old in names.items() if old in sparse})
    types = _types(file, "layer_types", (FULL, SPARSE_ATTENTION), sparse.get("sparse_attention_freq"), FULL)
    longest = file.size("index_topk_blocks", 16) * file.size("index_block_size", 128)
    if SPARSE_ATTENTION not in types or longest >= file.max_position:
        return {}
    note = f"sparse attention is not supported: contexts are limited to {longest} of {file.max_position} tokens, up to which it is dense"
    return {"max_position": longest, "notes": (f"{file.path}: {note}",)}


def _types(file: ConfigFile, key: str, known: tuple[str, str], flags: Any, default: str) -> list[str]:
    """Kind of each layer: the list ``key``, or else from ``flags``, one number per layer; ``default`` if both are missing."""
    file.require(
        flags is None or isinstance(flags, list),
        f"layer flags for {key} should be a list of 0 and 1, not {flags!r:.60}",
    )
    if file.values.get(key) is None and flags is not None:
        file = file.with_values(file.values | {key: [known[bool(flag)] for flag in flags]})
    return read_layer_types(file, known, lambda n: default, key)
