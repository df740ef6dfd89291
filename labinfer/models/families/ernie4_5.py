"""ERNIE 4.5 (Baidu 2025, ERNIE 4.5 technical report; model card of baidu/ERNIE-4.5-0.3B-PT)."""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.rope_parameters import read_rope


class Ernie4_5ForCausalLM(Decoder):  # noqa: N801 - named as in config.json
    """Llama with interleaved rotary pairs; ``use_bias`` adds biases to all matrices."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(
            head_dim=128,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            tie_word_embeddings=True,
            max_position_embeddings=131072,
        )
        bias = file.get("use_bias", bool, False)
        attention = read_attention(file, rope=read_rope(file, interleaved=True), qkv_bias=bias, out_bias=bias)
        layer = LayerConfig(mixer=attention, mlp=replace(read_gated_mlp(file), bias=bias))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
