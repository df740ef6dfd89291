"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Pre-norm layers of grouped-query attention and a gated MLP."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        layer = LayerConfig(mixer=read_attention(file), mlp=read_gated_mlp(file))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
