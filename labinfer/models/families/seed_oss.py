"""Seed-OSS (model card of ByteDance-Seed/Seed-OSS-36B-Instruct)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder


class SeedOssForCausalLM(Decoder):
    """Llama with biases on queries, keys and values, and a configured head size."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(attention_bias=True, head_dim=128, num_key_value_heads=8)
        attention = read_attention(file, out_bias=file.get("attention_out_bias", bool, False))
        layer = LayerConfig(mixer=attention, mlp=read_gated_mlp(file))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
