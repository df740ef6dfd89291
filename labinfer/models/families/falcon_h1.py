"""Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448; model card of tiiuae/Falcon-H1-7B-Instruct)."""

from __future__ import annotations

import sys

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile, show_value
from labinfer.models.decoder import Decoder
from labinfer.models.families.granite import read_multiplier
from labinfer.models.families.layers.mamba import MAMBA_PARTS, read_mamba
from labinfer.models.families.layers.parallel_mixers import ParallelMixersConfig
from labinfer.models.families.layers.scaled_mlp import ScaledMLPConfig
from labinfer.weights.checkpoint_names import CheckpointNames


class FalconH1ForCausalLM(Decoder):
    """Attention and Mamba-2 side by side in every layer. Factors on inputs and keys are part of the attention's scale."""

    names = CheckpointNames(
        renamed={
            "self_attn.attention": "self_attn",
            **{f"self_attn.mamba.{part}": f"mamba.{part}" for part in MAMBA_PARTS},
            "mlp": "feed_forward",
            "post_attention_layernorm": "pre_ff_layernorm",
            "model.norm": "model.final_layernorm",
        }
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=8192, num_key_value_heads=8)
        factor = {
            name: read_multiplier(file, f"{name}_multiplier")
            for name in ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
        }
        bias, in_bias = (file.get(key, bool, False) for key in ("attention_bias", "mamba_proj_bias"))
        file.require(not (bias and factor["attention_in"] != 1), "attention_bias true needs attention_in_multiplier 1")
        file.require(not (in_bias and factor["ssm_in"] != 1), "mamba_proj_bias true needs ssm_in_multiplier 1")
        has_norm = file.get("mamba_rms_norm", bool, False)
        file.require(
            not (has_norm and file.get("mamba_norm_before_gate", bool, True)),
            "mamba_norm_before_gate true with mamba_rms_norm true is not supported; only a norm after the gate is",
        )
        scale = file.head_size**-0.5 * factor["key"] * factor["attention_in"] ** 2
        inner = file.values.get("mamba_d_ssm")
        expanded = file.size("mamba_expand", 2) * file.size("hidden_size")
        mamba = read_mamba(
            file,
            expanded if inner is None and "mamba_d_ssm" in file.values else file.size("mamba_d_ssm", 1024),
            has_norm=has_norm,
            in_bias=in_bias,
            out_bias=file.get("projectors_bias", bool, False),
            multipliers=tuple(factor["ssm_in"] * part for part in _read_factors(file, "ssm_multipliers", 5)),
        )
        mixer = ParallelMixersConfig(
            attention=read_attention(file, scale=scale),
            mamba=mamba,
            attention_scale=factor["attention_in"] * factor["attention_out"],
            mamba_scale=factor["ssm_out"],
        )
        gate, output = _read_factors(file, "mlp_multipliers", 2)
        mlp = ScaledMLPConfig(**vars(read_gated_mlp(file)), gate_scale=gate, output_scale=output)
        layers = [LayerConfig(mixer=mixer, mlp=mlp)] * file.size("num_hidden_layers")
        scales = {"embedding_scale": factor["embedding"], "logits_divisor": 1 / factor["lm_head"]}
        return read_model(file, layers, **scales)


def _read_factors(file: ConfigFile, key: str, count: int) -> list[float]:
    """``count`` factors under ``key``; ones if it is missing."""
    values = file.values.get(key)
    values = [1.0] * count if values is None else values
    file.require(
        isinstance(values, list)
        and len(values) == count
        and all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in values),
        f"{key} should be a list of {count} finite numbers, not {show_value(values)}",
    )
    return [float(value) for value in values]
