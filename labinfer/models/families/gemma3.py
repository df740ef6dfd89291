"""Gemma 3, text part (Gemma team 2025, arXiv:2503.19786; model card of google/gemma-3-4b-it), and helpers shared with Gemma 4."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.layers.rope import RopeConfig
from labinfer.models.rope_parameters import read_rope, require_ropes_by_type
from labinfer.weights.checkpoint_names import CheckpointNames

ROOTS = ("language_model.model", "model.language_model", "model")
SANDWICH_NORMS = {
    "self_attn_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


class Gemma3ForCausalLM(Decoder):
    """Sandwich norms, whose weights are stored minus 1; 5 of 6 layers have a sliding window."""

    norm_placement = "sandwich"
    names = CheckpointNames(
        renamed=SANDWICH_NORMS,
        roots=ROOTS,
        ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.text_part().with_defaults(
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131072,
            sliding_window=4096,
            query_pre_attn_scalar=256,
            tie_word_embeddings=True,
        )
        file.require(
            file.values.get("attn_logit_softcapping") is None, "attn_logit_softcapping is not supported in Gemma 3"
        )
        file.require(
            not file.get("use_bidirectional_attention", bool, False), "use_bidirectional_attention is not supported"
        )
        scalar = file.get("query_pre_attn_scalar", float)
        file.require(scalar > 0, f"query_pre_attn_scalar should be above 0, not {scalar}")
        eps = file.get("rms_norm_eps", float, 1e-6)
        mlp = read_gelu_mlp(file, file.size("intermediate_size"))
        every = file.size("sliding_window_pattern", 6)
        windows = read_windows(file, file.size("sliding_window"), lambda n: SLIDING if (n + 1) % every else FULL)
        ropes = _read_ropes(file)
        layers = [
            LayerConfig(
                mixer=read_attention(
                    file,
                    rope=ropes[window > 0],
                    window=window,
                    qk_norm="head",
                    qk_norm_eps=eps,
                    qk_norm_offset=1.0,
                    scale=scalar**-0.5,
                ),
                mlp=mlp,
            )
            for window in windows
        ]
        scale = file.size("hidden_size") ** 0.5
        return read_model(
            file, layers, norm_offset=1.0, embedding_scale=scale, logits_cap=read_cap(file, "final_logit_softcapping")
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Text part of the multimodal model, without the vision tower. Transformers' class of this name has no cap on the logits."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        config = super().read_config(file.with_defaults(vocab_size=262208, num_attention_heads=8))
        file.require(config.logits_cap is None, "final_logit_softcapping beside pictures is not supported")
        return config


def read_gelu_mlp(file: ConfigFile, columns: int) -> GatedMLPConfig:
    """A gated MLP with the tanh approximation of GELU.

    Raises:
        UserError: the config has another activation.
    """
    activation = file.get("hidden_activation", str, "gelu_pytorch_tanh")
    file.require(
        activation == "gelu_pytorch_tanh",
        f"hidden_activation {activation!r:.60} is not supported; only gelu_pytorch_tanh is",
    )
    return GatedMLPConfig(intermediate_size=columns, activation="gelu")


def read_cap(file: ConfigFile, key: str) -> float | None:
    """Soft cap ``key`` of logits or attention scores; None for no cap.

    Raises:
        UserError: the cap is not a number above 0.
    """
    if file.values.get(key) is None:
        return None
    cap = file.get(key, float)
    file.require(cap > 0, f"{key} should be above 0, not {cap}")
    return cap


def _read_ropes(file: ConfigFile) -> dict[bool, RopeConfig]:
    """Rotary configs of layers with (True) and without (False) a sliding window. Scaling without a layer type applies to layers without a window.

    Raises:
        UserError: the parameters are not given for each layer type, or are invalid.
    """
    require_ropes_by_type(file)
    unscaled = file.without("rope_scaling")
    local = file.with_values(unscaled.values | {"rope_theta": file.get("rope_local_base_freq", float, 1e4)})
    return {True: read_rope(local, SLIDING), False: read_rope(file.with_defaults(rope_theta=1e6), FULL)}
