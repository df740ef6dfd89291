"""Family of DeepSeek-V3, R1 and V3.1 (DeepSeek-AI 2024, arXiv:2412.19437), and Kimi K2 (Kimi team 2025, arXiv:2507.20534)."""

from __future__ import annotations

from labinfer.models.config import ModelConfig, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.deepseek_v2 import read_groups, read_latent_layers, require_scores
from labinfer.models.families.layers.router import RouterConfig, read_router
from labinfer.models.families.mtp_decoder import MTPDecoder, read_mtp
from labinfer.weights.checkpoint_names import CheckpointNames


class DeepseekV3ForCausalLM(MTPDecoder):
    """Latent attention; dense first layers, then sigmoid-routed experts with a selection bias, and a shared expert."""

    names = CheckpointNames(renamed={"mlp.shared_expert": "mlp.shared_experts"}, has_draft_layers=True)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        layers = read_latent_layers(
            file,
            read_biased_router(file, num_groups=8, num_chosen_groups=4),
            interleaved=file.get("rope_interleave", bool, True),
            dense=range(file.get("first_k_dense_replace", int, 3)),
        )
        return read_model(file, layers, mtp=read_mtp(file, layers[-1], "num_nextn_predict_layers"))


def read_biased_router(file: ConfigFile, *, num_groups: int = 1, num_chosen_groups: int = 1) -> RouterConfig:
    """Router with sigmoid scores, a selection bias and group-limited choice (arXiv:2408.15664).

    Args:
        num_groups: default of ``n_group``.
        num_chosen_groups: default of ``topk_group``.

    Raises:
        UserError: a key is missing or invalid.
    """
    file = file.with_aliases(num_local_experts="n_routed_experts")
    require_scores(file, "sigmoid")
    method = file.get("topk_method", str, "noaux_tc")
    file.require(
        method == "noaux_tc", f"topk_method {method!r} is not supported for this architecture; only noaux_tc is"
    )
    return read_router(
        file,
        file.size("n_routed_experts"),
        file.size("num_experts_per_tok"),
        scores="sigmoid",
        bias_dims=1,
        normalized=file.get("norm_topk_prob", bool, True),
        scale=file.get("routed_scaling_factor", float),
        **read_groups(file, num_groups, num_chosen_groups),
    )
