"""Hy3 and Hy-MT2, HunYuan's third version (model card of tencent/Hy3-preview)."""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_layer_types,
    read_model,
)
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.families.mtp_decoder import MTPDecoder, read_mtp
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.weights.checkpoint_names import CheckpointNames


class HYV3ForCausalLM(MTPDecoder):
    """Normalized heads; sigmoid-routed experts with a selection bias and a shared expert, and dense first layers."""

    names = CheckpointNames(
        renamed={
            "mlp.gate": "mlp.router.gate",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "mlp.shared_expert": "mlp.shared_mlp",
        },
        has_draft_layers=True,
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_aliases(num_experts="num_local_experts").with_defaults(
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            rope_theta=11158840.0,
        )
        file.require(file.get("route_norm", bool, True), "route_norm false is not supported; only true is")
        experts, chosen = file.size("num_experts", 192), file.size("num_experts_per_tok", 8)
        scale = file.get("router_scaling_factor", float, 2.826)
        columns, dense = file.size("moe_intermediate_size", 1536), read_gated_mlp(file)
        shared = GatedMLPConfig(intermediate_size=columns * file.size("num_shared_experts", 1), bias=dense.bias)
        router = read_router(file, experts, chosen, scores="sigmoid", bias_dims=1, scale=scale)
        mixture = MixtureConfig(router=router, intermediate_size=columns, shared=shared)
        attention = read_attention(file, qk_norm="head", qk_norm_eps=file.get("rms_norm_eps", float))
        first = file.get("first_k_dense_replace", int, 1)
        kinds = read_layer_types(
            file, ("dense", "sparse"), lambda n: "dense" if n < first else "sparse", "mlp_layer_types"
        )
        layers = [LayerConfig(mixer=attention, mlp=dense if kind == "dense" else mixture) for kind in kinds]
        return read_model(file, layers, mtp=read_mtp(file, layers[-1], "num_nextn_predict_layers"))

    def add_parts(self, config: ModelConfig, ctx: StageContext) -> None:
        super().add_parts(config, ctx)
        if self.mtp is not None:
            norm = {"mtp.norm": f"model.layers.{config.num_layers}.final_layernorm"}
            self.names = replace(self.names, renamed={**self.names.renamed, **norm})
