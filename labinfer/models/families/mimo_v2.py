"""MiMo-V2-Flash (model card of XiaomiMiMo/MiMo-V2-Flash)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_layer_types,
    read_model,
    read_windows,
)
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.deepseek_v3 import read_biased_router
from labinfer.models.families.glm4_moe_lite import DENSE, SPARSE
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.narrow_value_attention import NarrowValueAttentionConfig
from labinfer.models.rope_parameters import read_rope, require_ropes_by_type
from labinfer.weights.checkpoint_names import CheckpointNames

ROPES = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
    for kind, theta in ((FULL, 5e6), (SLIDING, 1e4))
}
"""Rope parameters of a config without any."""
HUB_ROPES = {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
"""Keys of the published config that state ``ROPES``."""


class MiMoV2FlashForCausalLM(Decoder):
    """Values narrower than keys; 5 of 6 layers have a sliding window, twice the KV heads and attention sinks; sigmoid-routed experts."""

    names = CheckpointNames(renamed={"self_attn.sinks": "self_attn.attention_sink_bias"}, ignored=("model.mtp.",))

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.without("attention_chunk_size").with_defaults(  # the published config has one, and no chunked layer
            num_key_value_heads=4, head_dim=192, v_head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=131072
        )
        file = file.with_defaults(
            num_experts_per_tok=8, moe_intermediate_size=2048, n_routed_experts=256, attention_value_scale=0.707
        )
        for key, value in HUB_ROPES.items() if file.values.get("rope_parameters") is None else ():
            given = file.values.get(key, value)
            file.require(given == value, f"{key} {given!r:.60} needs rope_parameters; without them it is {value}")
        scale, ropes = file.get("routed_scaling_factor", float, 1.0), file.values.get("rope_parameters") or ROPES
        file = file.with_values(file.values | {"routed_scaling_factor": scale, "rope_parameters": ropes})
        require_ropes_by_type(file)
        window = file.size("sliding_window_size", file.size("sliding_window", 129) - 1) + 1
        windows = read_windows(file, window, lambda n: FULL if n == 0 or (n + 1) % 6 == 0 else SLIDING)
        mixers = {w: _read_attention(file, w) for w in set(windows)}
        columns = file.size("moe_intermediate_size")
        mixture = MixtureConfig(router=read_biased_router(file), intermediate_size=columns)
        mlps = {SPARSE: mixture, DENSE: read_gated_mlp(file)}
        types = read_layer_types(file, (DENSE, SPARSE), lambda n: SPARSE if n else DENSE, "mlp_layer_types")
        layers = [LayerConfig(mixer=mixers[w], mlp=mlps[kind]) for w, kind in zip(windows, types, strict=True)]
        return read_model(file, layers)


def _read_attention(file: ConfigFile, window: int) -> NarrowValueAttentionConfig:
    kv_heads = file.size("num_key_value_heads") * (2 if window else 1)
    rope = read_rope(file, SLIDING if window else FULL, partial=True)
    file = file.with_values(file.values | {"num_key_value_heads": kv_heads})
    size, scale = file.size("v_head_dim"), file.get("attention_value_scale", float, 1.0)
    file.require(size <= file.head_size, f"v_head_dim {size} is more than head_dim {file.head_size}")
    attention = read_attention(file, window=window, rope=rope, out_bias=False, sinks=window > 0)
    return NarrowValueAttentionConfig(**vars(attention), value_size=size, value_scale=scale)
