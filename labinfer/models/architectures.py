"""The architectures that are supported, by name; known without torch, so that a wrong model is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.model_files import config_path, read_config

MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "SeedOssForCausalLM": "seed_oss",
    "Glm4ForCausalLM": "glm4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "kimi_k2",
    "Kimi_K25ForConditionalGeneration": "kimi_k2",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "MiniCPM3ForCausalLM": "minicpm3",
    "GptOssForCausalLM": "gpt_oss",
}
"""Class names, as in ``architectures`` of ``config.json``, and the modules beside this one that have them."""
CAUSAL_LM, WITH_PICTURES = "ForCausalLM", "ForConditionalGeneration"


def _base_model(name: str) -> str:
    """Name of Transformers' base model, without an output head, of a class in ``MODULES``."""
    stem = name.removesuffix(WITH_PICTURES).removesuffix(CAUSAL_LM)
    return f"{stem}TextModel" if name.endswith(CAUSAL_LM) and stem + WITH_PICTURES in MODULES else f"{stem}Model"


BASE_MODELS = {_base_model(name): name for name in MODULES if not name.startswith("Kimi")}
"""For each base model the class in ``MODULES`` that runs it. Kimi K2.5's is left out: its own names are written by no release."""


def check_architecture(directory: Path) -> None:
    """Refuse a checkpoint that ``registry.load_config`` would refuse without looking at the model.

    Raises:
        UserError: there is no config, it is broken, or its architecture is not supported.
    """
    path, values = config_path(directory), read_config(directory)
    refuse_unknown(path, values)
    if values.get("architectures") is None:
        raise UserError(f"{path} has no 'architectures'; is the checkpoint complete?")


def refuse_unknown(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse the config at ``path`` if it names one class, which is not here, or none but code of its own.

    Raises:
        UserError: the text has the class and the list of those that are supported.
    """
    names = values.get("architectures")
    if not names and values.get("auto_map"):
        what = f"model_type {values.get('model_type')!r:.60} without 'architectures'"
    elif (
        isinstance(names, list)
        and len(names) == 1
        and isinstance(names[0], str)
        and names[0] not in MODULES | BASE_MODELS
    ):
        what = f"architecture {names[0]!r:.60}"
    else:
        return
    code = " (the code that 'auto_map' names is never run)" if values.get("auto_map") else ""
    raise UserError(f"{path}: {what} is not supported{code}; supported are {', '.join(MODULES)}")
