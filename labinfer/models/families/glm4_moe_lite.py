"""GLM-4.7-Flash (model card of zai-org/GLM-4.7-Flash)."""

from __future__ import annotations

from labinfer.models.config import ModelConfig, read_layer_types, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.deepseek_v2 import read_latent_layers
from labinfer.models.families.deepseek_v3 import read_biased_router
from labinfer.models.families.mtp_decoder import MTPDecoder, read_mtp
from labinfer.weights.checkpoint_names import CheckpointNames

DENSE, SPARSE = "dense", "sparse"


class Glm4MoeLiteForCausalLM(MTPDecoder):
    """DeepSeek-V3's layers; ``mlp_layer_types`` lists which are dense."""

    names = CheckpointNames(renamed={"mlp.shared_expert": "mlp.shared_experts"}, has_draft_layers=True)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(rms_norm_eps=1e-5, routed_scaling_factor=1.8)
        layers = read_latent_layers(
            file,
            read_biased_router(file),
            interleaved=file.get("rope_interleave", bool, True),
            dense=_read_dense_layers(file),
        )
        return read_model(file, layers, mtp=read_mtp(file, layers[-1], "num_nextn_predict_layers"))


def _read_dense_layers(file: ConfigFile) -> list[int]:
    """Indices of the layers without experts: from ``mlp_layer_types``, or the first ``first_k_dense_replace``."""
    if file.values.get("mlp_layer_types") is None:
        return list(range(file.get("first_k_dense_replace", int, 1)))
    types = read_layer_types(file, (DENSE, SPARSE), lambda n: SPARSE, "mlp_layer_types")
    return [layer for layer, kind in enumerate(types) if kind == DENSE]
