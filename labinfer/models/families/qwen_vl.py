"""Text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (model cards of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-30B-A3B-Instruct)."""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import ModelConfig
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.qwen3_moe import Qwen3MoeForCausalLM
from labinfer.models.qwen2 import Qwen2ForCausalLM
from labinfer.models.qwen3 import Qwen3ForCausalLM
from labinfer.weights.checkpoint_names import CheckpointNames

NAMES = CheckpointNames(roots=("model.language_model", "model"), ignored=("visual.", "model.visual."))
MROPE = ("mrope_section", "mrope_interleaved")


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2's layers. Both the published names and those of Transformers 5 are read."""

    names = NAMES

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        return super().read_config(
            read_text_part(file, rope_theta=1e6, num_key_value_heads=8, max_position_embeddings=32768)
        )


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801 - named as in config.json
    """Qwen2.5's layers."""


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3's layers."""

    names = NAMES

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        return super().read_config(read_text_part(file, rope_theta=5e5, max_position_embeddings=128000))


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-MoE's layers; published checkpoints store the experts of a layer input-major, Transformers 5 output-major."""

    names = NAMES

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = read_text_part(file, rope_theta=5e5, max_position_embeddings=128000, num_experts_per_tok=4)
        config = super().read_config(file.with_values(file.values | {"norm_topk_prob": True}))
        layers = (
            replace(layer, mlp=replace(layer.mlp, may_be_input_major=True))
            if isinstance(layer.mlp, MixtureConfig)
            else layer
            for layer in config.layers
        )
        return replace(config, layers=tuple(layers))


def read_text_part(file: ConfigFile, **defaults: float) -> ConfigFile:
    """Config of the text part. Rope of type ``mrope`` is plain rope, as all three positions of a text token are equal.

    Args:
        defaults: values that Transformers assumes for missing keys.

    Raises:
        UserError: ``text_config`` is not an object.
    """
    tied = file.get("tie_word_embeddings", bool, False)
    if "Qwen2" in file.architecture:  # in Qwen3-VL the text part's own value has no effect in Transformers
        tied = tied or bool(file.get("text_config", dict, {}).get("tie_word_embeddings"))
    file = file.text_part().with_defaults(**defaults)
    values = file.values | {"tie_word_embeddings": tied}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := values.get(key), dict):
            rope = {name: "default" if value == "mrope" else value for name, value in rope.items()}
            values[key] = {name: value for name, value in rope.items() if name not in MROPE}
    return file.with_values(values)
