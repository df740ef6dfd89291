"""The architectures that are supported, by name; known without torch, so that a wrong model is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labinfer.errors import UserError
from labinfer.weights.model_files import config_path, read_config

MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
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
}
"""Class names, as in ``architectures`` of ``config.json``, and the modules beside this one that have them."""


def check_architecture(directory: Path) -> None:
    """Refuse a checkpoint that ``registry.load_config`` would refuse without looking at the model.

    Raises:
        UserError: there is no config, it is broken, or its architecture is not supported.
    """
    path, names = config_path(directory), read_config(directory).get("architectures")
    if names is None:
        raise UserError(f"{path} has no 'architectures'; is the checkpoint complete?")
    refuse_unknown(path, names)


def refuse_unknown(path: Path, names: Any) -> None:
    """Raises:
    UserError: ``architectures`` of the config at ``path`` names one class, which is not here.
    """
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] not in MODULES:
        raise UserError(f"{path}: architecture {names[0]!r} is not supported; supported are {', '.join(MODULES)}")
