"""Every key that Transformers' source reads from a supported family's config: obeyed, refused, or listed with the reason why it
cannot matter. A key that a newer Transformers reads fails here until one of the three holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIGS, architecture, auto_class
from config_values import family_reads, other_values

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config

CANNOT_MATTER = {
    "of training and dropout": "attention_dropout embd_pdrop resid_pdrop residual_dropout router_jitter_noise "
    "router_aux_loss_coef output_router_logits initializer_range",
    "ids that no forward pass of text reads: padding is not computed here, others mark pictures and sounds": "pad_token_id "
    "audio_token_id image_token_id video_token_id eos_token_id",
    "of configs with towers for pictures and sounds, which are left out, and where the text's stands in them": "attention_context_left attention_context_right "
    "attention_invalid_logits_value attention_logit_cap audio_config audio_embed_dim conv_kernel_size depth gradient_clipping "
    "image_size in_channels layer_norm_eps mm_embed_dim mm_posemb_size mm_tokens_per_image model_patch_size num_heads "
    "num_position_embeddings out_hidden_size output_proj_dims patch_size pooling_kernel_size position_embedding_size "
    "residual_weight spatial_merge_size standardize subsampling_conv_channels temporal_patch_size use_clipped_linears "
    "vision_config text_config merged_hidden_size num_channels projector_hidden_size",
    "methods, properties and attributes of classes, which are no keys of config.json": "get pop get_text_config "
    "standardize_rope_params validate_rope nested_rope_parameter_keys default_theta default_rope_type is_heterogeneous "
    "ignore_keys_at_rope_validation kv_sharing_modes number_of_conv_states logits_scaling convert_rope_params_to_dict",
    "how many tokens Transformers computes at once, or returns logits of": "mamba_chunk_size chunk_size num_logits_to_keep",
    "attributes of modules in the same file, which are no configs": "config max_seq_len_cached original_inv_freq "
    "original_max_seq_len rope_type cumulative_length",
}
"""Names by the reason why they cannot matter, in any family."""
CANNOT_MATTER_IN = {
    "head_dim": ("Transformers sets it to qk_rope_head_dim", "deepseek kimi glm-4.7 minicpm3"),
    "num_key_value_heads": (
        "latent attention has a key for every head; with another number Transformers fails",
        "deepseek kimi glm-4.7 minicpm3",
    ),
    "intermediate_size": ("no layer of the kind is dense", "qwen3.5-moe deepseek-v2 granite-hybrid"),
    "hidden_act": ("the towers' activation; the text has hidden_activation", "gemma4"),
    "global_head_dim": ("per_layer_config, which Transformers writes, goes before it", "gemma4"),
    "num_global_key_value_heads": ("as global_head_dim", "gemma4"),
    "num_experts": ("without enable_moe_block there are none", "gemma4"),
    "top_k_experts": ("as num_experts", "gemma4"),
    "moe_intermediate_size": ("as num_experts", "gemma4"),
    "use_double_wide_mlp": ("only layers that read the cache of others are twice as wide", "gemma4"),
    "vocab_size_per_layer_input": ("without hidden_size_per_layer_input there is no such table", "gemma4"),
    "use_sliding_window": ("without sliding_window it changes nothing", "smollm3"),
    "rope_theta": (
        "rope_parameters are needed, and state it; or nothing is rotated",
        "gemma4 ministral3 granite-hybrid",
    ),
    "original_max_position_embeddings": (
        "rope parameters by type of layers have their own; or nothing is rotated",
        "gemma4 mimo step3 granite-hybrid",
    ),
    "attention_chunk_size": ("no layer is of the chunked type", "mimo"),
    "n_group": ("greedy choice has no groups", "deepseek-v2-lite"),
    "topk_group": ("greedy choice has no groups", "deepseek-v2-lite"),
    "index_head_dim": ("without a choice of blocks there is no indexer", "minimax-m3"),
    "index_n_heads": ("as index_head_dim", "minimax-m3"),
    "index_local_blocks": ("as index_head_dim", "minimax-m3"),
    **dict.fromkeys(
        ["heads", "layers", "layer_scale_init_value", "ls_init_value", "mlp_ratio", "projector_bias", "width"],
        ("keys of the tower for pictures", "step3"),
    ),
    **dict.fromkeys(
        ("moe_layer_freq", "moe_layers_enum"),
        ("mlp_layer_types, which Transformers writes, goes before it", "step3"),
    ),
    "sparse_attention_config": ("layer_types, which Transformers writes, goes before it", "step3"),
    "num_nextn_predict_layers": ("MTP layers are left out", "step3"),
    "mamba_expand": ("mamba_d_ssm, which Transformers writes, goes before it", "falcon-h1"),
    "mamba_norm_before_gate": ("without mamba_rms_norm there is no norm", "falcon-h1"),
    "layers_block_type": ("layer_types, which Transformers writes, goes before it", "granite-hybrid"),
    **dict.fromkeys(
        ("partial_rotary_factor", "rope_parameters"),
        ("without position_embedding_type rope nothing is rotated", "granite-hybrid"),
    ),
    "num_experts_per_tok": ("a dense model has no experts", "granite-hybrid"),
    "max_window_layers": ("without use_sliding_window it changes nothing", "qwen3-next qwen3.5"),
}
"""Names by the reason why they cannot matter in some kinds of checkpoints, and parts of the names of these kinds."""
CANNOT_MATTER_TO = {
    "nemotron-h": {
        "heads and their size give the width": "expand mamba_expand",
        "layers_block_type, which Transformers writes, goes before them": "hybrid_override_pattern num_hidden_layers",
        "of initial weights; as a bound Transformers takes the smallest time step in prompts only": "time_step_min time_step_max "
        "time_step_floor mamba_dt_min mamba_dt_max mamba_dt_init_floor rescale_prenorm_residual",
        "layers of experts are refused": "moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group topk_group "
        "n_routed_experts num_local_experts norm_topk_prob num_experts_per_tok routed_scaling_factor",
        "MTP layers are left out": "mtp_hybrid_override_pattern mtp_layers_block_type num_nextn_predict_layers",
        "nothing is rotated": "original_max_position_embeddings partial_rotary_factor rope_parameters rope_theta",
        "which kernels Transformers takes": "use_mamba_kernels",
    },
    "-vl-": {
        "keys of the tower for pictures": "deepstack_visual_indexes embed_dim fullatt_block_indexes mlp_ratio tokens_per_second window_size",
        "an attribute of the class": "sub_configs_defaults",
    },
    **dict.fromkeys(
        ("deepseek-v3.2", "glm-5"),
        {
            "mlp_layer_types, which Transformers writes, goes before it": "first_k_dense_replace",
            "n_routed_experts, which Transformers writes, goes before it": "num_experts",
            "without the indexer all layers are alike": "index_head_dim index_n_heads index_skip_topk_offset index_topk_freq "
            "index_topk_pattern indexer_types",
            "the context is within it; tests of the families have longer ones": "index_topk",
            "as in other families with latent attention": "head_dim num_key_value_heads",
        },
    ),
    "hy3": {
        "only rounding depends on it": "enable_moe_fp32_combine",
        "num_experts, which Transformers writes, goes before it": "num_local_experts",
    },
}
"""Names by parts of the names of kinds, and the reason why they cannot matter to these."""
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}


def excused(key: str, kind: str) -> bool:
    if any(key in names.split() for names in CANNOT_MATTER.values()):
        return True
    parts = (reasons for part, reasons in CANNOT_MATTER_TO.items() if part in kind)
    if any(key in names.split() for reasons in parts for names in reasons.values()):
        return True
    _, kinds = CANNOT_MATTER_IN.get(key, ("", ""))
    return any(part in kind for part in kinds.split())


def without(values: dict[str, Any], kept: str, *gone: str) -> dict[str, Any]:
    """The values but for those that are ``gone``, ``kept`` among them excepted."""
    return {name: value for name, value in values.items() if name == kept or name not in gone}


class Reader:
    """Reads changed configs of one kind."""

    def __init__(self, kind: str, directory: Path):
        self._path = directory / "config.json"
        self._values = json.loads(CONFIGS[kind]().to_json_string()) | {"architectures": [architecture(kind)]}
        self._is_nested = "text_config" in self._values

    def is_heeded(self, key: str) -> bool:
        """Whether another value of ``key`` changes what is read, or is refused; perhaps only where keys that go before it are gone."""
        text = self._values["text_config"] if self._is_nested else self._values
        bases = [
            without(text, key, *gone) for gone in ((), ("layer_types",), ("rope_parameters",), ("sliding_window",))
        ]
        for base in (
            *bases,
            without(text | WINDOWED, key, "layer_types"),
            without(text, key, "layer_types", "no_rope_layers"),
        ):
            try:
                before = self._read(base)
            except UserError:
                continue
            for value in other_values(key, base.get(key)):
                try:
                    if value != base.get(key) and self._read(base | {key: value}) != before:
                        return True
                except UserError:
                    return True
        return False

    def _read(self, text: dict[str, Any]):
        values = self._values | ({"text_config": text} if self._is_nested else text)
        if self._is_nested and "tie_word_embeddings" in text:
            values["tie_word_embeddings"] = text["tie_word_embeddings"]
        if not self._is_nested:
            values = text
        self._path.write_text(json.dumps(values))
        return load_config(self._path.parent)


@pytest.mark.parametrize("kind", CONFIGS)
def test_key_that_transformers_reads_is_obeyed_or_refused_or_cannot_matter(kind, tmp_path):
    assert auto_class(kind)
    reader, names = Reader(kind, tmp_path), family_reads(kind)
    assert {"hidden_size", "is_causal", "sliding_window"} <= names  # the reading itself works
    ignored = sorted(key for key in names if not excused(key, kind) and not reader.is_heeded(key))
    assert not ignored, (
        f"Transformers reads {', '.join(ignored)} of {kind}: obey or refuse them, or say why they cannot matter"
    )
