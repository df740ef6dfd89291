"""Gemma 2 (Gemma team 2024, arXiv:2408.00118)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.gemma3 import SANDWICH_NORMS, read_cap, read_gelu_mlp
from labinfer.weights.checkpoint_names import CheckpointNames


class Gemma2ForCausalLM(Decoder):
    """Sandwich norms, whose weights are stored minus 1; soft caps on attention scores and logits; a sliding window in every other layer."""

    norm_placement = "sandwich"
    names = CheckpointNames(renamed=SANDWICH_NORMS)

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=8192,
            sliding_window=4096,
            query_pre_attn_scalar=256,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        )
        file.require(
            not file.get("use_bidirectional_attention", bool, False), "use_bidirectional_attention is not supported"
        )
        scalar = file.get("query_pre_attn_scalar", float)
        file.require(scalar > 0, f"query_pre_attn_scalar should be above 0, not {scalar}")
        window = file.size("sliding_window") if file.values.get("sliding_window") is not None else 0
        windows = read_windows(file, window, lambda n: FULL if n % 2 else SLIDING)
        attention = {"scale": scalar**-0.5, "score_cap": read_cap(file, "attn_logit_softcapping") or 0.0}
        mlp = read_gelu_mlp(file, file.size("intermediate_size"))
        layers = [LayerConfig(mixer=read_attention(file, window=w, **attention), mlp=mlp) for w in windows]
        return read_model(
            file,
            layers,
            norm_offset=1.0,
            embedding_scale=file.size("hidden_size") ** 0.5,
            logits_cap=read_cap(file, "final_logit_softcapping"),
        )
