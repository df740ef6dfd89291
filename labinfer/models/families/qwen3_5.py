"""Qwen3.5, 3.6 and 3.8, dense, text part (model card of Qwen/Qwen3.5-9B)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_layer_types,
    read_model,
    require_no_window,
)
from labinfer.models.config_file import FULL, ConfigFile
from labinfer.models.families.layers.gated_delta import GatedDeltaConfig
from labinfer.models.families.mtp_decoder import MTPDecoder, read_mtp
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.layers.mixer import MixerConfig, MLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames

LINEAR = "linear_attention"
DELTA_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias",
               "norm", "out_proj")  # fmt: skip


class Qwen3_5ForCausalLM(MTPDecoder):  # noqa: N801 - named as in config.json
    """Three Gated DeltaNet layers, then one with gated attention; norm weights are stored minus 1."""

    names = CheckpointNames(
        renamed={f"self_attn.{part}": f"linear_attn.{part}" for part in DELTA_PARTS},
        roots=("model.language_model", "model"),
        ignored=("mtp.", "model.visual."),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.text_part()
        mlp = read_gated_mlp(file)
        layers = [LayerConfig(mixer=mixer, mlp=mlp) for mixer in read_hybrid_mixers(file)]
        return read_model(file, layers, norm_offset=1.0, mtp=read_hybrid_mtp(file, mlp))


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801 - named as in config.json
    """Text part of the multimodal model, without the vision tower."""


def read_hybrid_mixers(file: ConfigFile, stored_by_key_head: bool = False) -> list[MixerConfig]:
    """Mixers of all layers.

    Args:
        stored_by_key_head: see ``GatedDeltaConfig``.

    Raises:
        UserError: a key is missing or invalid.
    """
    interval = file.size("full_attention_interval", 4)
    types = read_layer_types(file, (LINEAR, FULL), lambda n: LINEAR if (n + 1) % interval else FULL)
    file.require(file.get("attn_output_gate", bool, True), "attn_output_gate false is not supported")
    eps = file.get("rms_norm_eps", float, 1e-6)
    attention = read_gated_attention(file)
    key_heads, value_heads = file.size("linear_num_key_heads", 16), file.size("linear_num_value_heads", 32)
    file.require(
        value_heads % key_heads == 0,
        f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}",
    )
    delta = GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_size=file.size("linear_key_head_dim", 128),
        value_size=file.size("linear_value_head_dim", 128),
        conv_width=file.size("linear_conv_kernel_dim", 4),
        norm_eps=eps,
        stored_by_key_head=stored_by_key_head,
    )
    return [attention if kind == FULL else delta for kind in types]


def read_gated_attention(file: ConfigFile) -> AttentionConfig:
    """Attention with a sigmoid gate on its output.

    Raises:
        UserError: a key is missing or invalid.
    """
    require_no_window(file, (FULL, LINEAR))
    file = file.with_defaults(head_dim=256, partial_rotary_factor=0.25)
    eps = file.get("rms_norm_eps", float, 1e-6)
    rope = read_rope(file, partial=True)
    return read_attention(
        file, rope=rope, window=0, qk_norm="head", qk_norm_eps=eps, qk_norm_offset=1.0, output_gate=True
    )


def read_hybrid_mtp(file: ConfigFile, mlp: MLPConfig) -> LayerConfig | None:
    """Decoder layer inside the MTP layer; its mixer is always attention. Configs often lack the number of MTP layers, which defaults to 1.

    Raises:
        UserError: a key is missing or invalid.
    """
    key = "mtp_num_hidden_layers" if "mtp_num_hidden_layers" in file.values else "num_nextn_predict_layers"
    return read_mtp(file, LayerConfig(mixer=read_gated_attention(file), mlp=mlp), key, default=1)
