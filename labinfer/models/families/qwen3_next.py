"""Qwen3-Next (model card of Qwen/Qwen3-Next-80B-A3B-Instruct)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.qwen3_5 import Qwen3_5ForCausalLM, read_hybrid_mixers, read_hybrid_mtp
from labinfer.models.families.qwen3_5_moe import read_hybrid_mixture
from labinfer.models.families.qwen3_moe import read_qwen_mlps


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5's layers with projections stored by key head, and a mixture of experts in most layers."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(num_experts_per_tok=10, num_local_experts=512, norm_topk_prob=True)
        mixers = read_hybrid_mixers(file, stored_by_key_head=True)
        mixture = read_hybrid_mixture(file)
        mlps = read_qwen_mlps(file, mixture)
        layers = [LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
        return read_model(file, layers, norm_offset=1.0, mtp=read_hybrid_mtp(file, mixture))
