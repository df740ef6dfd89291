"""DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv:2512.02556) and GLM-5 (model card of zai-org/GLM-5), with dense attention.

Their sparse attention lets a token attend to the ``index_topk`` keys that an indexer chooses: to all keys in contexts of that length.
"""

from __future__ import annotations

from labinfer.models.config import ModelConfig, read_layer_types, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.families.deepseek_v2 import read_latent_layers
from labinfer.models.families.deepseek_v3 import DeepseekV3ForCausalLM, read_biased_router
from labinfer.models.families.layers.unread_indexer import UnreadIndexer
from labinfer.models.families.mtp_decoder import read_mtp
from labinfer.models.layers.context import StageContext

INDEXED = "indexed_attention"
NOTE = (
    "sparse attention (index_topk {0}) is computed densely: identical to the reference up to {0} tokens of context, "
    "which --max-model-len defaults to, and an approximation beyond"
)


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3's layers without the indexer. ``n_group`` and ``topk_group`` default to 8 and 4."""

    default_groups = (8, 4)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        read_layer_types(file, (INDEXED,), lambda n: INDEXED)
        file = file.without("layer_types").with_defaults(routed_scaling_factor=2.5)
        first = file.get("first_k_dense_replace", int, 3)
        kinds = read_layer_types(
            file, ("dense", "sparse"), lambda n: "dense" if n < first else "sparse", "mlp_layer_types"
        )
        groups, chosen = cls.default_groups
        layers = read_latent_layers(
            file,
            read_biased_router(file, num_groups=groups, num_chosen_groups=chosen),
            interleaved=file.get("rope_interleave", bool, True),
            dense=[n for n, kind in enumerate(kinds) if kind == "dense"],
        )
        config = read_model(file, layers, mtp=read_mtp(file, layers[-1], "num_nextn_predict_layers"))
        longest = file.size("index_topk", 2048)
        if longest >= config.max_position:
            return config
        return read_model(
            file, layers, mtp=config.mtp, exact_context=longest, notes=(f"{file.path}: {NOTE.format(longest)}",)
        )

    def add_parts(self, config: ModelConfig, ctx: StageContext) -> None:
        super().add_parts(config, ctx)
        for layer in self._cached_layers():
            layer.self_attn.indexer = UnreadIndexer()


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5 to 5.2: some layers have no indexer and reuse the keys chosen before. Experts are in a single group by default."""

    default_groups = (1, 1)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        return super().read_config(file.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=202752))
