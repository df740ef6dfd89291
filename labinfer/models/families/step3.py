"""Step-3.5-Flash, and the text part of Step-3.7-Flash (model cards of stepfun-ai/Step-3.5-Flash and stepfun-ai/Step-3.7-Flash)."""

from __future__ import annotations

import math
import sys
from typing import Any

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_layer_types,
    read_model,
)
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.glm4_moe_lite import DENSE, SPARSE
from labinfer.models.families.layers.clamped_mlp import ClampedMLPConfig
from labinfer.models.families.layers.expert_biases import ClampedGateConfig
from labinfer.models.families.layers.head_gate_attention import HeadGateAttentionConfig
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.layers.mixer import MLPConfig
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames

PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)
"""Lists with an entry per layer, after which entries of MTP layers may follow."""


class Step3p5ForCausalLM(Decoder):
    """Gated heads, more of them in layers with a sliding window; sigmoid-routed experts; norms whose weights are stored minus 1."""

    names = CheckpointNames(
        renamed={
            "mlp.gate": "moe.gate",
            "mlp.gate.e_score_correction_bias": "moe.router_bias",
            **{f"mlp.experts.{name}": f"moe.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
            "mlp.shared_expert": "share_expert",
        },
        ignored=("vision_model.", "vit_large_projector."),
        has_draft_layers=True,
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = _read_lists(file)
        for key, known in (("gating", (None, True, "per-head")), ("use_bidirectional_attention", (None, False))):
            given = file.values.get(key)
            file.require(given in known, f"{key} {given!r:.60} is not supported; only {known[1]} is")
        types = read_layer_types(file, (FULL, SLIDING), lambda n: FULL)
        mixers = {kind: _read_attention(file, kind, types) for kind in set(types)}
        file.require(
            file.values.get("per_layer_config") in (None, _own_heads(types, mixers)),
            "per_layer_config is not supported but for the heads of layers with a sliding window",
        )
        kinds = read_layer_types(file, (DENSE, SPARSE), lambda n: DENSE if n < 3 else SPARSE, "mlp_layer_types")
        mlps = [_read_mlp(file, layer, kind) for layer, kind in enumerate(kinds)]
        layers = [LayerConfig(mixer=mixers[kind], mlp=mlp) for kind, mlp in zip(types, mlps, strict=True)]
        return read_model(file.without("per_layer_config"), layers, norm_offset=1.0)


class Step3p7ForConditionalGeneration(Step3p5ForCausalLM):
    """Text part of Step-3.7-Flash, whose tensors have the names of Step-3.5-Flash."""


def _read_lists(file: ConfigFile) -> ConfigFile:
    """The text part's values, with defaults, in the newer names of keys, and with the entries of the model's own layers only."""
    file = file.text_part().with_aliases(
        num_local_experts="n_routed_experts",
        moe_num_experts="n_routed_experts",
        moe_top_k="num_experts_per_tok",
        share_expert_dims="share_expert_dim",
        num_attention_groups="num_key_value_heads",
    )
    file = file.with_defaults(head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=128000)
    count, values = file.size("num_hidden_layers"), file.values
    values = values | {key: values[key][:count] for key in PER_LAYER if isinstance(values.get(key), list)}
    if values.get("mlp_layer_types") is None and (sparse := values.get("moe_layers_enum")) is not None:
        names = sparse.split(",") if isinstance(sparse, str) else sparse
        is_list = isinstance(names, list) and all(str(name).strip().isdigit() for name in names)
        file.require(is_list, f"moe_layers_enum should be layers such as 3,4,5, not {sparse!r:.60}")
        numbers = set(map(int, names))
        values |= {"mlp_layer_types": [SPARSE if layer in numbers else DENSE for layer in range(count)]}
    return file.with_values(values)


def _read_attention(file: ConfigFile, kind: str, types: list[str]) -> HeadGateAttentionConfig:
    values = file.values
    window = file.size("sliding_window") if kind == SLIDING else 0
    if not isinstance(file.get("rope_parameters", dict, {}).get(kind), dict):
        own: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
        for key, new in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
            if values.get(key) is not None:
                own[new] = _choose(file, key, kind, types)
        own |= file.get("rope_scaling", dict, {}) if kind == FULL else {}
        values = values | {"rope_parameters": {kind: own}}
    if kind == SLIDING:
        heads = file.get("attention_other_setting", dict, {}).get("num_attention_heads")
        heads = values.get("num_sliding_attention_heads") or heads or values.get("num_attention_heads")
        values = values | {"num_attention_heads": heads}
    file = file.with_values(values).without("rope_scaling", "rope_theta", "partial_rotary_factors")
    scalar = file.get("query_pre_attn_scalar", float, float(file.head_size))
    file.require(scalar > 0, f"query_pre_attn_scalar should be above 0, not {scalar}")
    attention = read_attention(
        file,
        window=window,
        rope=read_rope(file, kind, partial=True),
        qk_norm="head",
        qk_norm_eps=file.get("rms_norm_eps", float),
        qk_norm_offset=1.0,
        scale=scalar**-0.5,
    )
    return HeadGateAttentionConfig(**vars(attention))


def _choose(file: ConfigFile, key: str, kind: str, types: list[str]) -> Any:
    """Value of ``key`` in layers of type ``kind``: a number for all layers, or a list with an entry per layer."""
    values = file.values[key]
    if not isinstance(values, list):
        return values
    chosen = [value for value, layer in zip(values, types, strict=False) if layer == kind]
    holds = len(values) == len(types) and chosen.count(chosen[0]) == len(chosen)
    file.require(holds, f"{key} should have an entry per layer, equal in all layers of type {kind}, not {values!r:.60}")
    return chosen[0]


def _own_heads(types: list[str], mixers: dict[str, HeadGateAttentionConfig]) -> dict[str, dict[str, int]]:
    """``per_layer_config`` as Transformers writes it."""
    return {str(n): {"num_attention_heads": mixers[kind].num_heads} for n, kind in enumerate(types) if kind == SLIDING}


def _read_mlp(file: ConfigFile, layer: int, kind: str) -> MLPConfig:
    routed, shared = (_read_gate(file, key, layer) for key in ("swiglu_limits", "swiglu_limits_shared"))
    dense = read_gated_mlp(file)

    def clamped(columns: int) -> GatedMLPConfig:
        fields = {"intermediate_size": columns, "bias": dense.bias}
        return GatedMLPConfig(**fields) if shared is None else ClampedMLPConfig(**fields, gate=shared)

    if kind == DENSE:
        return clamped(dense.intermediate_size)
    router = read_router(
        file,
        file.size("n_routed_experts", 288),
        file.size("num_experts_per_tok", 8),
        scores="sigmoid",
        bias_dims=1,
        scale=file.get("moe_router_scaling_factor", float, 1.0),
    )
    return MixtureConfig(
        router=router,
        intermediate_size=file.size("moe_intermediate_size", 1280),
        shared=clamped(file.size("share_expert_dim", 1280)),
        gate=routed,
        stacked_apart=True,
    )


def _read_gate(file: ConfigFile, key: str, layer: int) -> ClampedGateConfig | None:
    """Clamps of ``silu(gate)`` from above and of ``up`` from both sides in one layer; None for none.

    The clamped ``silu(gate)`` is that of a clamped gate, as SiLU increases where it is above 0.
    """
    limits = file.values.get(key) or [None] * (layer + 1)
    is_list = isinstance(limits, list) and len(limits) > layer
    file.require(is_list, f"{key} should be a list with a number for each layer, not {limits!r:.60}")
    limit = limits[layer] or 0.0
    is_number = type(limit) in (int, float) and 0 <= limit <= sys.float_info.max
    file.require(is_number, f"{key} should be finite numbers from 0 on, not {limit!r:.60}")
    if not limit:
        return None
    gate = limit = float(limit)
    for _ in range(50):
        gate = limit * (1 + math.exp(-gate))
    return ClampedGateConfig(alpha=1.0, limit=limit, has_biases=False, gate_limit=gate, offset=0.0)
