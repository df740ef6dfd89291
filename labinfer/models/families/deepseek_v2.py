"""Family of DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434)."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

from labinfer.models.config import LayerConfig, ModelConfig, read_gated_mlp, read_model, require_no_window
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.latent_attention import LatentAttentionConfig
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import RouterConfig, read_router
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class DeepseekV2ForCausalLM(Decoder):
    """Latent attention; dense first layers, then softmax-routed experts, optionally group-limited, with shared experts."""

    names = CheckpointNames(renamed={"mlp.shared_expert": "mlp.shared_experts"}, has_draft_layers=True)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_aliases(num_experts="n_routed_experts")
        file.require(
            not file.get("norm_topk_prob", bool, False),
            "norm_topk_prob true is not supported for DeepSeek-V2; only false is",
        )
        require_scores(file, "softmax")
        method = file.get("topk_method", str, "greedy")
        file.require(
            method in ("greedy", "group_limited_greedy"),
            f"topk_method {method!r} is not supported; supported are greedy and group_limited_greedy",
        )
        groups = {} if method == "greedy" else read_groups(file) | {"num_group_best": 1}
        router = read_router(
            file,
            file.size("n_routed_experts", 64),
            file.size("num_experts_per_tok"),
            normalized=False,
            scale=file.get("routed_scaling_factor", float, 1.0),
            **groups,
        )
        dense = range(file.get("first_k_dense_replace", int, 0))
        return read_model(file, read_latent_layers(file, router, interleaved=True, dense=dense))


def read_latent_layers(
    file: ConfigFile, router: RouterConfig, *, interleaved: bool, dense: Container[int]
) -> list[LayerConfig]:
    """Layers with latent attention, some of them dense and the others with experts.

    Args:
        interleaved: see ``RopeConfig``.
        dense: indices of the layers without experts.

    Raises:
        UserError: a key is missing or invalid.
    """
    columns = file.size("moe_intermediate_size")
    file.require(
        file.get("moe_layer_freq", int, 1) == 1,
        f"moe_layer_freq {file.values.get('moe_layer_freq')!r} is not supported; only 1 is",
    )
    plain = read_gated_mlp(file)
    shared = GatedMLPConfig(intermediate_size=columns * file.size("n_shared_experts"), bias=plain.bias)
    mixture = MixtureConfig(router=router, intermediate_size=columns, shared=shared)
    attention = read_latent_attention(file, interleaved)
    return [
        LayerConfig(mixer=attention, mlp=plain if layer in dense else mixture)
        for layer in range(file.size("num_hidden_layers"))
    ]


def read_latent_attention(file: ConfigFile, interleaved: bool) -> LatentAttentionConfig:
    """Read the config of latent attention (MLA) from the keys that all families with latent attention have. The norms' epsilon is the default
    of ``LatentAttentionConfig``.

    Args:
        interleaved: see ``RopeConfig``.

    Raises:
        UserError: a key is missing or invalid.
    """
    require_no_window(file)
    unrotated, rotated = file.size("qk_nope_head_dim"), file.size("qk_rope_head_dim")
    rope = read_rope(file.with_values(file.values | {"head_dim": rotated}), interleaved=interleaved)
    return LatentAttentionConfig(
        num_heads=file.size("num_attention_heads"),
        query_rank=0 if file.values.get("q_lora_rank") is None else file.size("q_lora_rank"),
        rank=file.size("kv_lora_rank"),
        unrotated=unrotated,
        value_size=file.size("v_head_dim"),
        rope=rope,
        scale=(unrotated + rotated) ** -0.5 * _sharpening(file, rope.parameters) ** 2,
        bias=file.get("attention_bias", bool, False),
    )


def _sharpening(file: ConfigFile, parameters: Mapping[str, Any]) -> float:
    """YaRN's factor on queries and on keys, which sharpens the attention scores in extended contexts (arXiv:2309.00071)."""
    mscale, factor = parameters.get("mscale_all_dim") or 0.0, parameters.get("factor") or 1.0
    numbers = all(isinstance(number, (int, float)) and number >= 0 for number in (mscale, factor))
    file.require(numbers, f"rope factor {factor!r:.60} and mscale_all_dim {mscale!r:.60} should be numbers")
    if parameters["rope_type"] == "default" or not mscale or factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def read_groups(file: ConfigFile, num_groups: int = 1, num_chosen: int = 1) -> dict[str, int]:
    """Fields of a ``RouterConfig`` for group-limited routing.

    Args:
        num_groups: default of ``n_group``.
        num_chosen: default of ``topk_group``.
    """
    return {"num_groups": file.size("n_group", num_groups), "num_chosen_groups": file.size("topk_group", num_chosen)}


def require_scores(file: ConfigFile, scores: str) -> None:
    """Reject a ``scoring_func`` other than ``scores``.

    Raises:
        UserError: the config has another scoring function.
    """
    given = file.get("scoring_func", str, scores)
    file.require(
        given == scores, f"scoring_func {given!r:.60} is not supported for this architecture; only {scores} is"
    )
