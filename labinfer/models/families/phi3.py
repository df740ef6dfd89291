"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219) and Phi-4 (arXiv:2412.08905), also mini (arXiv:2503.01743)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_model,
    require_one_type,
)
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class Phi3ForCausalLM(Decoder):
    """Llama with fused projections; a part of each head may be rotated, with LongRoPE's factors."""

    names = CheckpointNames(
        fused={("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(
            rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096
        )
        window = file.size("sliding_window") if file.values.get("sliding_window") is not None else 0
        require_one_type(file, window)
        attention = read_attention(file, rope=_read_rope(file), qkv_bias=False, out_bias=False, window=window)
        layer = LayerConfig(mixer=attention, mlp=read_gated_mlp(file))
        return read_model(file, [layer] * file.size("num_hidden_layers"))


def _read_rope(file: ConfigFile):
    """Rotary config; early configs name LongRoPE ``yarn``."""
    values = dict(file.values)
    for key in ("rope_parameters", "rope_scaling"):
        given = values.get(key)
        if isinstance(given, dict) and (given.get("rope_type") or given.get("type")) == "yarn":
            values[key] = given | {"rope_type": "longrope"}
    return read_rope(file.with_values(values), partial=True)
