"""Kimi K2.5 and K2.6, text part (model card of moonshotai/Kimi-K2.5). K2 itself is a ``DeepseekV3ForCausalLM``."""

from __future__ import annotations

from labinfer.models.config import ModelConfig
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from labinfer.weights.checkpoint_names import CheckpointNames

TEXT_MODELS = ("kimi_k2", "deepseek_v3")


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """DeepSeek-V3's layers: text part of the multimodal model, without the vision tower."""

    names = CheckpointNames(
        renamed={"mlp.shared_expert": "mlp.shared_experts"},
        has_draft_layers=True,
        roots=("language_model.model", "model.language_model"),
        ignored=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        kind = file.with_values(file.get("text_config", dict, {})).get("model_type", str, "deepseek_v3")
        file.require(
            kind in TEXT_MODELS,
            f"model_type {kind!r:.60} of text_config is not supported; supported are {', '.join(TEXT_MODELS)}",
        )
        return super().read_config(file.text_part())


class Kimi_K25ForConditionalGeneration(KimiK25ForConditionalGeneration):  # noqa: N801 - named as in Transformers
    """Kimi K2.5 under the class name that Transformers writes."""
