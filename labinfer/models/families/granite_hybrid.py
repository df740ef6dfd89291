"""Granite 4 with Mamba-2 layers, dense and MoE (model cards of ibm-granite/granite-4.0-h-micro and ibm-granite/granite-4.0-h-small)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_layer_types,
    require_no_window,
)
from labinfer.models.config_file import FULL, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.granite import GraniteMoeForCausalLM, read_multiplier, read_scaled_model
from labinfer.models.families.layers.mamba import MAMBA_PARTS, read_mamba
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.layers.mixer import MLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames

TYPES = {"mamba": "linear_attention", "attention": FULL}
"""Layer types in configs of the hub → their names in Transformers 5."""
LINEAR = TYPES["mamba"]


class GraniteMoeHybridForCausalLM(Decoder):
    """Granite whose mixers are Mamba-2 or attention, mostly without RoPE; every layer has a dense MLP, or experts and a shared expert."""

    names = CheckpointNames(
        renamed={
            **{f"self_attn.{part}": f"mamba.{part}" for part in MAMBA_PARTS},
            **{name: stored for name, stored in GraniteMoeForCausalLM.names.renamed.items() if name != "mlp"},
            "mlp.input_linear": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
            "mlp.shared_expert": "shared_mlp",
            "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
        },
        fused={("gate_proj", "up_proj"): "input_linear"},
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        key = "layer_types" if file.values.get("layer_types") is not None else "layers_block_type"
        if isinstance(file.values.get(key), list):
            types = [TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in file.values[key]]
            file = file.with_values(file.values | {"layer_types": types})
        types = read_layer_types(file, (LINEAR, FULL), lambda n: LINEAR)
        position = file.values.get("position_embedding_type")
        file.require(
            position in (None, "nope", "rope"),
            f"position_embedding_type {position!r:.60} is not supported; only rope, nope and null are",
        )
        require_no_window(file, (LINEAR, FULL))
        scale, rope = read_multiplier(file, "attention_multiplier"), read_rope(file) if position == "rope" else None
        attention = read_attention(file, rope=rope, window=0, scale=scale)
        bias = file.get("mamba_proj_bias", bool, False)
        inner = file.size("mamba_expand", 2) * file.size("hidden_size")
        mamba = read_mamba(file, inner, in_bias=bias, out_bias=bias)
        mlp = _read_mlp(file)
        layers = [LayerConfig(mixer=attention if kind == FULL else mamba, mlp=mlp) for kind in types]
        return read_scaled_model(file, layers)


def _read_mlp(file: ConfigFile) -> MLPConfig:
    shared = read_gated_mlp(file.with_defaults(shared_intermediate_size=1024), "shared_intermediate_size")
    num_experts = file.get("num_local_experts", int, 8)
    if not num_experts:
        return shared
    router = read_router(file, num_experts, file.size("num_experts_per_tok", 2), scores="chosen")
    return MixtureConfig(router=router, intermediate_size=file.size("intermediate_size"), shared=shared)
