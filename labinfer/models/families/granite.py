"""Granite 3 and 4 without Mamba layers: dense and MoE models (Granite team, IBM 2024; model cards of ibm-granite/granite-3.3-8b-instruct and
ibm-granite/granite-3.1-3b-a800m-instruct)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.layers.mixer import MLPConfig
from labinfer.weights.checkpoint_names import CheckpointNames


class GraniteForCausalLM(Decoder):
    """Llama whose embeddings, attention scores, residual branches and logits are scaled."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        return _read_model(file, read_gated_mlp(file))


class GraniteMoeForCausalLM(Decoder):
    """Granite with experts, weighted by a softmax over the logits of the chosen experts."""

    names = CheckpointNames(
        renamed={
            "mlp": "block_sparse_moe",
            "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
            "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        }
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        experts, chosen = file.size("num_local_experts", 8), file.size("num_experts_per_tok", 2)
        router = read_router(file, experts, chosen, scores="chosen")
        return _read_model(file, MixtureConfig(router=router, intermediate_size=read_gated_mlp(file).intermediate_size))


def _read_model(file: ConfigFile, mlp: MLPConfig) -> ModelConfig:
    attention = read_attention(file, scale=read_multiplier(file, "attention_multiplier"))
    return read_scaled_model(file, [LayerConfig(mixer=attention, mlp=mlp)] * file.size("num_hidden_layers"))


def read_scaled_model(file: ConfigFile, layers: list[LayerConfig]) -> ModelConfig:
    """Read the model's keys, with Granite's factors on embeddings, residual branches and logits.

    Raises:
        UserError: a key is missing or invalid.
    """
    return read_model(
        file,
        layers,
        embedding_scale=read_multiplier(file, "embedding_multiplier"),
        residual_scale=read_multiplier(file, "residual_multiplier"),
        logits_divisor=read_multiplier(file, "logits_scaling"),
    )


def read_multiplier(file: ConfigFile, key: str) -> float:
    """Factor under ``key``, above 0; 1 if it is missing.

    Raises:
        UserError: it is not a number above 0.
    """
    value = float(file.get(key, float, 1.0))
    file.require(value > 0, f"{key} should be a number above 0, not {value}")
    return value
