"""Qwen3.5, 3.6 and 3.8 with a mixture of experts, text part (model card of Qwen/Qwen3.5-35B-A3B)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.qwen3_5 import Qwen3_5ForCausalLM, read_hybrid_mixers, read_hybrid_mtp
from labinfer.models.families.qwen3_moe import read_qwen_router


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801 - named as in config.json
    """Qwen3.5 with routed experts in every layer and a shared expert that is weighted by a sigmoid gate."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.text_part().with_defaults(num_experts_per_tok=8, num_local_experts=256)
        mixture = read_hybrid_mixture(file.with_values(file.values | {"norm_topk_prob": True}))
        layers = [LayerConfig(mixer=mixer, mlp=mixture) for mixer in read_hybrid_mixers(file)]
        return read_model(file, layers, norm_offset=1.0, mtp=read_hybrid_mtp(file, mixture))


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):  # noqa: N801 - named as in config.json
    """Text part of the multimodal model, without the vision tower."""


def read_hybrid_mixture(file: ConfigFile) -> MixtureConfig:
    """Softmax-routed experts, and a shared expert with a sigmoid gate.

    Raises:
        UserError: a key is missing or invalid.
    """
    return MixtureConfig(
        router=read_qwen_router(file),
        intermediate_size=read_gated_mlp(file, "moe_intermediate_size").intermediate_size,
        shared=read_gated_mlp(file, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
