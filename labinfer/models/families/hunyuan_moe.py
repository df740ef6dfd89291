"""HunYuan with mixtures of experts (Sun et al. 2024, arXiv:2411.02265; model card of tencent/Hunyuan-A13B-Instruct)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.hunyuan import HunYuanDenseV1ForCausalLM
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class HunYuanMoEV1ForCausalLM(Decoder):
    """HunYuan's attention; every layer has routed experts and a shared MLP of equal size."""

    names = CheckpointNames(
        renamed={
            **HunYuanDenseV1ForCausalLM.names.renamed,
            "mlp.gate": "mlp.gate.wg",
            "mlp.shared_expert": "mlp.shared_mlp",
        }
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_aliases(num_local_experts="num_experts", num_experts_per_tok="moe_topk")
        file = file.with_defaults(rms_norm_eps=1e-5, num_experts=1, moe_topk=1)
        eps, mlp = file.get("rms_norm_eps", float), read_gated_mlp(file)
        attention = read_attention(
            file, rope=read_rope(file, fixed_stretch=True), qk_norm="head_after_rotation", qk_norm_eps=eps
        )
        layers = []
        for layer in range(file.size("num_hidden_layers")):
            own = read_layer_values(file, layer, "num_experts", "moe_topk")
            router = read_router(own, own.size("num_experts"), own.size("moe_topk"))
            mixture = MixtureConfig(router=router, intermediate_size=mlp.intermediate_size, shared=mlp)
            layers.append(LayerConfig(mixer=attention, mlp=mixture))
        return read_model(file, layers)


def read_layer_values(file: ConfigFile, layer: int, *keys: str) -> ConfigFile:
    """Copy of the config for layer ``layer``: each of ``keys`` that is a list (one value per layer) has that layer's
    value."""
    own = {}
    for key in keys:
        values = file.values[key]
        if isinstance(values, list):
            file.require(layer < len(values), f"{key} has {len(values)} entries, but there are more layers")
            own[key] = values[layer]
    return file.with_values(file.values | own)
