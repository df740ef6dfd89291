"""gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_model,
    read_windows,
)
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.expert_biases import ClampedGateConfig
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.weights.checkpoint_names import CheckpointNames

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default rope parameters of a config without any."""


class GptOssForCausalLM(Decoder):
    """Attention sinks, a sliding window in every other layer; experts with biases, weighted by a softmax over the logits of the chosen experts."""

    names = CheckpointNames(
        renamed={
            "mlp.gate": "mlp.router",
            "mlp.gate.e_score_correction_bias": "mlp.router.bias",
            "mlp.experts.biases.gate_up": "mlp.experts.gate_up_proj_bias",
            "mlp.experts.biases.down": "mlp.experts.down_proj_bias",
        }
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(
            head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, attention_bias=True, rope_theta=150000.0
        )
        if file.values.get("rope_parameters") is None and not file.values.get("rope_scaling"):
            file = file.with_values(file.values | {"rope_parameters": YARN})
        router = read_router(
            file,
            file.size("num_local_experts", 128),
            file.size("num_experts_per_tok", 4),
            scores="chosen",
            bias_dims=1,
        )
        gate = read_clamped_gate(file)
        columns = read_gated_mlp(file).intermediate_size
        mixture = MixtureConfig(router=router, intermediate_size=columns, gate=gate)
        window = file.size("sliding_window", 128)
        windows = read_windows(file, window, lambda n: FULL if n % 2 else SLIDING)
        layers = [LayerConfig(mixer=read_attention(file, window=w, sinks=True), mlp=mixture) for w in windows]
        return read_model(file, layers)


def read_clamped_gate(file: ConfigFile, *, has_biases: bool = True) -> ClampedGateConfig:
    """Clamped activation of the experts.

    Raises:
        UserError: a parameter is not a number above 0.
    """
    alpha, limit = _positive(file, "swiglu_alpha", 1.702), _positive(file, "swiglu_limit", 7.0)
    return ClampedGateConfig(alpha=alpha, limit=limit, gate_limit=limit, has_biases=has_biases)


def _positive(file: ConfigFile, key: str, default: float) -> float:
    value = file.get(key, float, default)
    file.require(value > 0, f"{key} should be above 0, not {value}")
    return float(value)
