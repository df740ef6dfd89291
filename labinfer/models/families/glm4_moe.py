"""GLM-4.5, 4.6 and 4.7 (GLM team 2025, arXiv:2508.06471)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_model,
)
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.families.mtp_decoder import MTPDecoder, read_mtp
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class Glm4MoeForCausalLM(MTPDecoder):
    """Sigmoid-routed experts with a selection bias, shared experts, dense first layers; half of each head is rotated."""

    names = CheckpointNames(renamed={"mlp.shared_expert": "mlp.shared_experts"}, has_draft_layers=True)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_aliases(num_local_experts="n_routed_experts").with_defaults(
            num_key_value_heads=8,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            n_routed_experts=128,
            moe_intermediate_size=1408,
        )
        columns, first = file.size("moe_intermediate_size"), file.get("first_k_dense_replace", int, 1)
        router = read_router(
            file,
            file.size("n_routed_experts"),
            file.size("num_experts_per_tok", 8),
            scores="sigmoid",
            bias_dims=1,
            normalized=file.get("norm_topk_prob", bool, True),
            scale=file.get("routed_scaling_factor", float, 1.0),
            num_groups=file.size("n_group", 1),
            num_chosen_groups=file.size("topk_group", 1),
        )
        shared = GatedMLPConfig(intermediate_size=columns * file.size("n_shared_experts", 1))
        mixture = MixtureConfig(router=router, intermediate_size=columns, shared=shared)
        qk_norm = "head" if file.get("use_qk_norm", bool, False) else "none"
        eps, dense = file.get("rms_norm_eps", float), read_gated_mlp(file)
        attention = read_attention(
            file, rope=read_rope(file, partial=True), out_bias=False, qk_norm=qk_norm, qk_norm_eps=eps
        )
        layers = [
            LayerConfig(mixer=attention, mlp=mixture if layer >= first else dense)
            for layer in range(file.size("num_hidden_layers"))
        ]
        return read_model(file, layers, mtp=read_mtp(file, layers[-1], "num_nextn_predict_layers"))
