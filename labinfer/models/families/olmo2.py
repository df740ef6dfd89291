"""OLMo 2 (Team OLMo 2024, arXiv:2501.00656)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.layers.full_norm_attention import full_norm
from labinfer.models.families.olmo3 import Olmo3ForCausalLM


class Olmo2ForCausalLM(Olmo3ForCausalLM):
    """OLMo 3 without sliding windows."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(rms_norm_eps=1e-5)
        attention = full_norm(read_attention(file, qk_norm_eps=file.get("rms_norm_eps", float)))
        layer = LayerConfig(mixer=attention, mlp=read_gated_mlp(file))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
