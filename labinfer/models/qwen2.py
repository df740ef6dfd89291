"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import ConfigFile, ModelConfig
from labinfer.models.llama import LlamaForCausalLM, read_llama_config


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See ``LlamaForCausalLM``; the biases come with the config."""


def read_qwen2_config(file: ConfigFile) -> ModelConfig:
    """``config.json`` of ``Qwen2ForCausalLM``.

    Raises:
        UserError: a key is missing, makes no sense, or asks for sliding-window attention.
    """
    file.require(
        not file.get("use_sliding_window", bool, False),
        "use_sliding_window is true; sliding-window attention is not supported",
    )
    return replace(read_llama_config(file), qkv_bias=True, out_bias=False, mlp_bias=False)
