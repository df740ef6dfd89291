"""Apertus (Project Apertus 2025, arXiv:2509.14233)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.xielu_mlp import XieluMLPConfig
from labinfer.weights.checkpoint_names import CheckpointNames

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rope parameters of a config without any."""


class ApertusForCausalLM(Decoder):
    """Llama with QK norm, and an MLP without gate, whose activation is xIELU."""

    names = CheckpointNames(
        renamed={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=65536, rope_theta=12e6)
        if file.values.get("rope_parameters") is None and not file.values.get("rope_scaling"):
            theta = file.values["rope_theta"]
            file.require(
                theta == 12e6, f"rope_theta {theta!r:.60} needs rope_parameters; without them Transformers ignores it"
            )
            file = file.with_values(file.values | {"rope_parameters": LLAMA3_ROPE})
        activation = file.get("hidden_act", str, "xielu")
        file.require(activation == "xielu", f"hidden_act {activation!r:.60} is not supported; only xielu is")
        attention = read_attention(file, qk_norm="head", qk_norm_eps=file.get("rms_norm_eps", float))
        layer = LayerConfig(mixer=attention, mlp=XieluMLPConfig(intermediate_size=file.size("intermediate_size")))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
