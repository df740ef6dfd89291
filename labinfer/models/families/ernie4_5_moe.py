"""ERNIE 4.5 with experts (Baidu 2025, ERNIE 4.5 technical report; model card of baidu/ERNIE-4.5-21B-A3B-PT)."""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class Ernie4_5_MoeForCausalLM(Decoder):  # noqa: N801 - named as in config.json
    """ERNIE 4.5 with softmax-routed experts, a selection bias and shared experts in later layers."""

    names = CheckpointNames(
        renamed={
            "mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias",
            "mlp.shared_expert": "mlp.shared_experts",
        },
        ignored=("model.mtp_",),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_aliases(num_experts="moe_num_experts", num_experts_per_tok="moe_k").with_defaults(
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            tie_word_embeddings=True,
            max_position_embeddings=131072,
            moe_intermediate_size=1536,
        )
        file.require(not file.get("use_bias", bool, False), "use_bias is not supported: no such checkpoint is known")
        columns, num_shared = file.size("moe_intermediate_size"), file.get("moe_num_shared_experts", int, 2)
        router = read_router(
            file,
            file.size("moe_num_experts", 64),
            file.size("moe_k", 6),
            bias_dims=2,
            least_sum=file.get("moe_norm_min", float, 1e-12),
        )
        mixture = MixtureConfig(
            router=router,
            intermediate_size=columns,
            shared=GatedMLPConfig(intermediate_size=columns * num_shared) if num_shared else None,
        )
        attention = read_attention(file, rope=read_rope(file, interleaved=True), qkv_bias=False, out_bias=False)
        dense, interval = replace(read_gated_mlp(file), bias=False), file.size("moe_layer_interval", 1)
        num_layers = file.size("num_hidden_layers")
        first, last = file.get("moe_layer_start_index", int, 1), file.get("moe_layer_end_index", int, -1)
        last = num_layers - 1 if last == -1 else last
        layers = [
            LayerConfig(mixer=attention, mlp=mixture if first <= n <= last and (n + 1) % interval == 0 else dense)
            for n in range(num_layers)
        ]
        return read_model(file, layers)
