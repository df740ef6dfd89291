"""MiniCPM3 (Hu et al. 2024, arXiv:2404.06395; model card of openbmb/MiniCPM3-4B)."""

from __future__ import annotations

import math

from labinfer.models.config import LayerConfig, ModelConfig, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.deepseek_v2 import read_latent_attention


class MiniCPM3ForCausalLM(Decoder):
    """Latent attention and dense MLPs; embeddings, residual branches and logits are scaled."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        heads, hidden = file.size("num_attention_heads"), file.size("hidden_size")
        file = file.with_defaults(rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=32768)
        file = file.with_values(file.values | {"v_head_dim": file.size("v_head_dim", hidden // heads)})
        num_layers = file.size("num_hidden_layers")
        layer = LayerConfig(mixer=read_latent_attention(file, interleaved=False), mlp=read_gated_mlp(file))
        depth = _number(file, "scale_depth", 1.4, math.sqrt(num_layers))
        return read_model(
            file,
            [layer] * num_layers,
            embedding_scale=_number(file, "scale_emb", 12.0, 1.0),
            residual_scale=depth / math.sqrt(num_layers),
            logits_divisor=hidden / _number(file, "dim_model_base", 256.0, hidden),
        )


def _number(file: ConfigFile, key: str, missing: float, null: float) -> float:
    """Value of ``key``, which must be above 0.

    Args:
        missing, null: results if the key is missing, and if its value is null.
    """
    value = file.get(key, float, null) if key in file.values else missing
    file.require(value > 0, f"{key} should be a number above 0, not {value!r}")
    return float(value)
