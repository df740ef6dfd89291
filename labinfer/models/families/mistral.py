"""Mistral (Jiang et al. 2023, arXiv:2310.06825), Ministral 3, and the text parts of their multimodal models."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_model,
    read_windows,
    require_one_type,
)
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.layers.attention import QueryScaling
from labinfer.weights.checkpoint_names import CheckpointNames


class MistralForCausalLM(Decoder):
    """Llama without biases; all layers, or those that ``layer_types`` names, may have a sliding window."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(sliding_window=4096, num_key_value_heads=8)
        return read_model(file, _layers(file))


class MinistralForCausalLM(MistralForCausalLM):
    """Ministral 8B under Transformers' class name; it is published as a ``MistralForCausalLM`` with ``layer_types``."""


class Ministral3ForCausalLM(Decoder):
    """Mistral with queries scaled by the logarithm of their position."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5)
        rope = file.values.get("rope_parameters") or file.values.get("rope_scaling") or {}
        file.require(isinstance(rope, dict), f"rope parameters should be an object, not {rope!r:.60}")
        beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        file.require(
            all(isinstance(value, (int, float)) and value > 0 for value in (beta, original)),
            "rope parameters should have llama_4_scaling_beta and original_max_position_embeddings, both above 0",
        )
        outer = file.values.get("original_max_position_embeddings")
        file.require(
            outer in (None, original),
            f"original_max_position_embeddings {outer!r:.60} differs from that of the rope parameters, {original}; drop it",
        )
        file.require(
            "dynamic" not in (rope.get("rope_type"), rope.get("type")),
            "rope of type dynamic is not supported beside llama_4_scaling_beta",
        )
        require_one_type(file, file.values.get("sliding_window") or 0)
        return read_model(file, _layers(file, query_scaling=QueryScaling(beta=beta, original_length=original)))


class Mistral3ForConditionalGeneration(Decoder):
    """Text part of Mistral Small 3.1 and later, and of Ministral 3 as published; ``text_config`` selects the family."""

    names = CheckpointNames(
        roots=("language_model.model", "model.language_model"),
        ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        text = file.with_values(file.get("text_config", dict, {}))
        kind = text.get("model_type", str, "mistral")
        families = {"mistral": MistralForCausalLM, "ministral3": Ministral3ForCausalLM}
        file.require(
            kind in families,
            f"model_type {kind!r:.60} of text_config is not supported; supported are {', '.join(families)}",
        )
        return families[kind].read_config(file.text_part())


def _layers(file: ConfigFile, **attention) -> list[LayerConfig]:
    window = file.size("sliding_window") if file.values.get("sliding_window") is not None else 0
    windows = read_windows(file, window, lambda n: SLIDING if window else FULL)
    mixers = {w: read_attention(file, window=w, qkv_bias=False, out_bias=False, **attention) for w in set(windows)}
    mlp = read_gated_mlp(file)
    return [LayerConfig(mixer=mixers[w], mlp=mlp) for w in windows]
