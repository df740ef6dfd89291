"""Architecture name → model class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from labinfer.errors import UserError
from labinfer.models.config import ConfigFile, ModelConfig
from labinfer.models.decoder import Decoder
from labinfer.models.ernie4_5 import Ernie4_5ForCausalLM
from labinfer.models.ernie4_5_moe import Ernie4_5_MoeForCausalLM
from labinfer.models.glm4 import Glm4ForCausalLM
from labinfer.models.glm4_moe import Glm4MoeForCausalLM
from labinfer.models.hunyuan import HunYuanDenseV1ForCausalLM
from labinfer.models.hunyuan_moe import HunYuanMoEV1ForCausalLM
from labinfer.models.llama import LlamaForCausalLM
from labinfer.models.minimax_m2 import MiniMaxM2ForCausalLM
from labinfer.models.mistral import Ministral3ForCausalLM, Mistral3ForConditionalGeneration, MistralForCausalLM
from labinfer.models.olmo3 import Olmo3ForCausalLM
from labinfer.models.phi3 import Phi3ForCausalLM
from labinfer.models.qwen2 import Qwen2ForCausalLM
from labinfer.models.qwen2_moe import Qwen2MoeForCausalLM
from labinfer.models.qwen3 import Qwen3ForCausalLM
from labinfer.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from labinfer.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from labinfer.models.qwen3_moe import Qwen3MoeForCausalLM
from labinfer.models.qwen3_next import Qwen3NextForCausalLM
from labinfer.models.seed_oss import SeedOssForCausalLM
from labinfer.models.smollm3 import SmolLM3ForCausalLM
from labinfer.weights.formats.registry import read_formats

FAMILIES: tuple[type[Decoder], ...] = (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    MistralForCausalLM,
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    SmolLM3ForCausalLM,
    Phi3ForCausalLM,
    Olmo3ForCausalLM,
    SeedOssForCausalLM,
    Glm4ForCausalLM,
    Ernie4_5ForCausalLM,
    HunYuanDenseV1ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
    Ernie4_5_MoeForCausalLM,
    HunYuanMoEV1ForCausalLM,
    Glm4MoeForCausalLM,
    MiniMaxM2ForCausalLM,
)
"""Named as in ``architectures`` of ``config.json``."""
ARCHITECTURES = {family.__name__: family for family in FAMILIES}


def load_config(directory: Path) -> ModelConfig:
    """Read a checkpoint's config.

    Raises:
        UserError: it is missing or broken, or names an architecture or a quantisation that is not here.
    """
    file = ConfigFile(directory)
    if file.architecture not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: architecture {file.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    formats = read_formats(
        file.values, file.path
    )  # refuses a quantisation that is not supported before anything is loaded
    return replace(ARCHITECTURES[file.architecture].read_config(file), formats=formats)


def model_class(config: ModelConfig) -> type[Decoder]:
    """The family that ``config`` was read for."""
    return ARCHITECTURES[config.architecture]


def with_window(config: ModelConfig, window: int) -> ModelConfig:
    """The config with a sliding window of so many tokens in every attention layer."""
    layers = tuple(replace(layer, mixer=layer.mixer.with_window(window)) for layer in config.layers)
    return replace(config, layers=layers)
