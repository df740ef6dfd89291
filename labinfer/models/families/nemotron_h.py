"""Nemotron-H and Nemotron Nano 2 (NVIDIA 2025, arXiv:2504.03624 and arXiv:2508.14444; model card of nvidia/NVIDIA-Nemotron-Nano-9B-v2)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_model, require_no_window
from labinfer.models.config_file import FULL, ConfigFile, show_value
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.mamba import read_mamba
from labinfer.models.families.layers.single_part import (
    NoMixerConfig,
    NoMLPConfig,
    SinglePartLayer,
    SquaredReluMLPConfig,
)
from labinfer.weights.checkpoint_names import CheckpointNames

KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "layer_norm_epsilon": "rms_norm_eps",
    "attention_head_dim": "head_dim",
    "time_step_limit": "mamba_dt_limit",
}
"""Config keys of the family → keys of other families with an equal meaning."""
DEFAULTS = {
    "mamba_d_head": 64,
    "mamba_n_groups": 8,
    "mamba_d_state": 128,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
TYPES = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "M"),
    **dict.fromkeys(("*", "attention", FULL), "*"),
    **dict.fromkeys(("-", "mlp"), "-"),
    **dict.fromkeys(("E", "moe"), "E"),
}
"""Names of layer types in configs → letters of ``hybrid_override_pattern``."""


class NemotronHForCausalLM(Decoder):
    """Each layer is a Mamba-2 mixer, attention without RoPE, or an MLP. Layers of experts are not supported."""

    layer_class = SinglePartLayer
    names = CheckpointNames(
        renamed={
            "model": "backbone",
            "model.embed_tokens": "backbone.embeddings",
            "model.norm": "backbone.norm_f",
            "input_layernorm": "norm",
            "self_attn": "mixer",
            "mlp": "mixer",
        },
        ignored=("mtp.",),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        pattern = _read_pattern(file)
        given = {KEYS[key]: value for key, value in file.values.items() if key in KEYS}
        values = {key: value for key, value in file.values.items() if key not in ("layer_types", "layers_block_type")}
        values = DEFAULTS | given | values | {"num_hidden_layers": len(pattern)}
        file = file.with_values(values | {"time_step_limit": values.get("mamba_dt_limit")})
        for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            value = file.get(key, str, only)
            file.require(value == only, f"{key} {value!r:.60} is not supported; only {only} is")
        file.require(not file.get("attention_bias", bool, False), "attention_bias true is not supported")
        require_no_window(file)
        bias = file.get("use_bias", bool, False)
        mamba = read_mamba(
            file, file.size("mamba_n_heads", 128) * file.size("mamba_d_head"), in_bias=bias, out_bias=bias
        )
        attention = read_attention(file, rope=None)
        mlp = SquaredReluMLPConfig(
            intermediate_size=file.size("intermediate_size"), bias=file.get("mlp_bias", bool, False)
        )
        layers = {
            "M": LayerConfig(mixer=mamba, mlp=NoMLPConfig()),
            "*": LayerConfig(mixer=attention, mlp=NoMLPConfig()),
            "-": LayerConfig(mixer=NoMixerConfig(), mlp=mlp),
        }
        return read_model(file, [layers[kind] for kind in pattern])


def _read_pattern(file: ConfigFile) -> list[str]:
    """Letter of each layer: see ``TYPES``."""
    keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    key = next((key for key in keys if file.values.get(key) is not None), keys[-1])
    value = file.values.get(key)
    kinds = value if isinstance(value, list | str) else ()
    pattern = [TYPES.get(kind, "") if isinstance(kind, str) else "" for kind in kinds]
    file.require(
        bool(pattern) and all(pattern),
        f"{key} should list Mamba (M), attention (*) and MLP (-) layers, not {show_value(value)}",
    )
    file.require(
        "E" not in pattern, f"{key} has layers of experts (E), which are not supported; use a dense Nemotron-H"
    )
    return pattern
