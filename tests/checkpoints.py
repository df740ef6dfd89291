"""Tiny random checkpoints made by Transformers, and what Transformers itself makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    ApertusConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    Kimi_K25Config,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Step3p7Config,
)

VOCAB = 512
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "你好,世界。今天天气很好",
    "pipeline parallel inference on two nodes",
    "0123456789 +-*/=",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 14 * 8,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LLAMA_SHAPE = QWEN_SHAPE | {
    "hidden_size": 12 * 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "intermediate_size": 170,
}
FAMILY_SHAPE = QWEN_SHAPE | {
    "hidden_size": 72,
    "intermediate_size": 112,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 16,
    "pad_token_id": 0,
}
"""Heads that are wider than the hidden size, and a number of KV heads that no tensor-parallel degree divides."""
NARROW = {key: value for key, value in FAMILY_SHAPE.items() if key != "head_dim"} | {"hidden_size": 10 * 16}
"""For families without a head size of their own."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OLMO_ROPE = {
    "full_attention": YARN | {"original_max_position_embeddings": 128},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA4 = FAMILY_SHAPE | {"hidden_size": 80}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 0.5 * i for i in range(6)],
}
LINEAR, FULL = "linear_attention", "full_attention"
HYBRID = FAMILY_SHAPE | {
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
}
TIED = {"tie_word_embeddings": True}
PICTURES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 72,
    "num_position_embeddings": 16,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 32,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
KIMI_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
MINIMAX_VISION = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
STEP_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1.0, "image_size": 28}
WINDOW_8 = {"use_sliding_window": True, "sliding_window": 8}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"moe_intermediate_size": 44, "num_experts_per_tok": 3}
"""Columns and experts that no tensor-parallel degree divides."""
LATENT = NARROW | {
    "num_key_value_heads": 10,
    "q_lora_rank": 28,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
}
"""Latent attention in which no two sizes are the same."""
GROUPS = MOE | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}
INDEXER = {"index_n_heads": 3, "index_head_dim": 20}
LITE_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "attention_bias": True,
}
MAMBA = {
    "mamba_n_heads": 10,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 20,
    "mamba_chunk_size": 16,
}
"""Mamba-2 layers in which no two sizes are the same."""
GRANITE_HYBRID = GRANITE | {
    "attention_bias": False,
    "num_local_experts": 0,
    "shared_intermediate_size": 50,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
}
FALCON_H1 = {
    "mamba_d_ssm": 320,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.8, 0.5],
}
HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0}

QWEN3_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
QWEN25_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "fullatt_block_indexes": [0]}
QWEN_VL_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True}

CONFIGS = {
    "qwen2-vl-pictures": lambda: Qwen2VLConfig(
        text_config=NARROW | {"rope_parameters": {"type": "mrope", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": NARROW["hidden_size"], "num_heads": 2},
    ),
    "qwen2.5-vl-pictures": lambda: Qwen2_5_VLConfig(
        text_config=NARROW | {"rope_parameters": {"type": "mrope", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        vision_config=QWEN25_VISION | {"out_hidden_size": NARROW["hidden_size"]},
        tie_word_embeddings=True,
    ),
    "qwen3-vl-pictures": lambda: Qwen3VLConfig(
        text_config=FAMILY_SHAPE | {"rope_parameters": QWEN_VL_ROPE},
        vision_config=QWEN3_VISION | {"out_hidden_size": 72},
    ),
    "qwen3-vl-moe-pictures": lambda: Qwen3VLMoeConfig(
        text_config=FAMILY_SHAPE | MOE | {"num_experts": 7, "mlp_only_layers": [1], "rope_parameters": QWEN_VL_ROPE},
        vision_config=QWEN3_VISION | {"out_hidden_size": 72},
    ),
    "qwen2-tied": lambda: Qwen2Config(**QWEN_SHAPE, tie_word_embeddings=True),
    "qwen2-untied-sharded": lambda: Qwen2Config(**QWEN_SHAPE, tie_word_embeddings=False),
    "qwen2-windows": lambda: Qwen2Config(**QWEN_SHAPE, **QWEN_WINDOWS, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "llama-tied-biased": lambda: LlamaConfig(
        **LLAMA_SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen3": lambda: Qwen3Config(**FAMILY_SHAPE, use_sliding_window=True, **WINDOW, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**FAMILY_SHAPE, sliding_window=8),
    "ministral": lambda: MinistralConfig(**FAMILY_SHAPE, **WINDOW),
    "ministral3": lambda: Ministral3Config(
        **FAMILY_SHAPE, rope_parameters=YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "ministral3-pictures": lambda: Mistral3Config(
        text_config=CONFIGS["ministral3"](), vision_config=PIXTRAL, tie_word_embeddings=False
    ),
    "mistral3-pictures": lambda: Mistral3Config(
        text_config=MistralConfig(**FAMILY_SHAPE, **TIED), vision_config=PIXTRAL, **TIED
    ),
    "smollm3": lambda: SmolLM3Config(**NARROW, no_rope_layers=[1, 0, 1, 0], attention_bias=True, mlp_bias=True),
    "phi3": lambda: Phi3Config(**NARROW, sliding_window=8),
    "phi4-mini": lambda: Phi3Config(
        **NARROW,
        original_max_position_embeddings=512,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
    ),
    "phi4-mini-long": lambda: Phi3Config(
        **NARROW,
        original_max_position_embeddings=1,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75, "attention_factor": 1.1},
    ),
    "olmo3": lambda: Olmo3Config(**NARROW, **WINDOW, rope_parameters=OLMO_ROPE),
    "gemma2": lambda: Gemma2Config(
        **FAMILY_SHAPE | {"hidden_size": 80},
        **WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **FAMILY_SHAPE | {"hidden_size": 80},
        **WINDOW,
        rope_parameters=GEMMA_ROPE,
        query_pre_attn_scalar=24,
        final_logit_softcapping=20.0,
    ),
    "gemma3-pictures": lambda: Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict() | {"final_logit_softcapping": None},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **GEMMA4, **WINDOW, hidden_size_per_layer_input=0, final_logit_softcapping=20.0, global_head_dim=24
    ),
    "gemma4-tied-values": lambda: Gemma4UnifiedTextConfig(
        **GEMMA4, **WINDOW, attention_k_eq_v=True, global_head_dim=24, num_global_key_value_heads=2
    ),
    "gemma4-moe": lambda: Gemma4TextConfig(
        **GEMMA4,
        **WINDOW,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=44,
        global_head_dim=32,
    ),
    "gemma4-layer-inputs": lambda: Gemma4TextConfig(
        **GEMMA4, **WINDOW, hidden_size_per_layer_input=12, vocab_size_per_layer_input=VOCAB, global_head_dim=24
    ),
    "gemma4-shared-caches": lambda: Gemma4TextConfig(
        **GEMMA4 | {"num_hidden_layers": 8},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention", "full_attention"] * 3],
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB,
        global_head_dim=24,
    ),
    "gemma4-pictures": lambda: Gemma4Config(
        text_config=CONFIGS["gemma4"]().to_dict(), vision_config=None, audio_config=None
    ),
    "gemma4-unified-pictures": lambda: Gemma4UnifiedConfig(
        text_config=CONFIGS["gemma4-tied-values"]().to_dict(), vision_config=None, audio_config=None
    ),
    "seed-oss": lambda: SeedOssConfig(**FAMILY_SHAPE, attention_out_bias=True),
    "glm4": lambda: Glm4Config(**FAMILY_SHAPE, partial_rotary_factor=0.5),
    "ernie4.5": lambda: Ernie4_5Config(**FAMILY_SHAPE, use_bias=True),
    "hunyuan": lambda: HunYuanDenseV1Config(**FAMILY_SHAPE, rope_parameters=HUNYUAN_ROPE),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **FAMILY_SHAPE, **MOE, **WINDOW_8, num_experts=11, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**HYBRID),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**HYBRID, **MOE, num_experts=7, shared_expert_intermediate_size=50),
    "qwen3-next-moe": lambda: Qwen3NextConfig(
        **HYBRID, **MOE, num_experts=7, shared_expert_intermediate_size=50, mlp_only_layers=[2]
    ),
    "qwen3.5-moe-pictures": lambda: Qwen3_5MoeConfig(
        text_config=HYBRID | MOE | TIED | {"num_experts": 7, "shared_expert_intermediate_size": 50},
        vision_config=PICTURES,
        **TIED,
    ),
    "qwen3.5-pictures": lambda: Qwen3_5Config(text_config=HYBRID | TIED, vision_config=PICTURES, **TIED),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **FAMILY_SHAPE,
        **MOE,
        **WINDOW_8,
        max_window_layers=2,
        num_experts=7,
        shared_expert_intermediate_size=50,
        decoder_sparse_step=2,
    ),
    "ernie4.5-moe": lambda: Ernie4_5_MoeConfig(**FAMILY_SHAPE, moe_intermediate_size=44, moe_num_experts=7, moe_k=3),
    "hunyuan-moe": lambda: HunYuanMoEV1Config(
        **FAMILY_SHAPE, num_experts=7, moe_topk=[3, 1, 2, 4], rope_parameters=HUNYUAN_ROPE
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **FAMILY_SHAPE, **MOE, n_routed_experts=7, routed_scaling_factor=1.8, use_qk_norm=True, attention_bias=True
    ),
    "glm4-moe-groups": lambda: Glm4MoeConfig(
        **FAMILY_SHAPE, **MOE, n_routed_experts=12, n_group=4, topk_group=2, n_shared_experts=2, norm_topk_prob=False
    ),
    "deepseek-v2-lite": lambda: DeepseekV2Config(
        **LATENT | {"q_lora_rank": None},
        **MOE,
        n_routed_experts=7,
        first_k_dense_replace=1,
        rope_parameters=LITE_YARN,
    ),
    "deepseek-v2": lambda: DeepseekV2Config(
        **LATENT, **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=1.5, attention_bias=True
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **LATENT,
        **GROUPS,
        first_k_dense_replace=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-plain": lambda: DeepseekV3Config(
        **LATENT | {"q_lora_rank": None, "v_head_dim": 44},
        **GROUPS,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        attention_bias=True,
        rope_interleave=False,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "kimi-k2": lambda: DeepseekV3Config(
        **LATENT,
        **MOE,
        n_routed_experts=11,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "kimi-k2.5-pictures": lambda: Kimi_K25Config(
        text_config=CONFIGS["kimi-k2"](),
        vision_config=KIMI_VISION,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    ),
    "glm-4.7-flash": lambda: Glm4MoeLiteConfig(
        **LATENT | {"v_head_dim": 32, "num_attention_heads": 20, "num_key_value_heads": 20},
        **MOE,
        n_routed_experts=7,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        num_nextn_predict_layers=0,
    ),
    "deepseek-v3.2": lambda: DeepseekV32Config(
        **LATENT,
        **GROUPS,
        **INDEXER,
        first_k_dense_replace=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm-5": lambda: GlmMoeDsaConfig(
        **LATENT | {"v_head_dim": 32}, **MOE, **INDEXER, n_routed_experts=7, indexer_types=["full", "shared"] * 2
    ),
    "hy3": lambda: HYV3Config(**FAMILY_SHAPE, **MOE, num_experts=7, attention_bias=True),
    "olmo2": lambda: Olmo2Config(**NARROW),
    "minicpm3": lambda: MiniCPM3Config(
        **LATENT, dim_model_base=64, scale_emb=3, rope_parameters=LONGROPE | {"original_max_position_embeddings": 512}
    ),
    "minimax-m2": lambda: MiniMaxM2Config(**FAMILY_SHAPE, num_local_experts=7, num_experts_per_tok=3, rotary_dim=8),
    "mixtral": lambda: MixtralConfig(
        **FAMILY_SHAPE | {"intermediate_size": 44}, num_local_experts=7, num_experts_per_tok=3, sliding_window=8
    ),
    "granite": lambda: GraniteConfig(**NARROW, **GRANITE, **TIED, mlp_bias=True),
    "granite-moe": lambda: GraniteMoeConfig(
        **NARROW | {"intermediate_size": 44}, **GRANITE, num_local_experts=7, num_experts_per_tok=3
    ),
    "granite-hybrid": lambda: GraniteMoeHybridConfig(**NARROW, **GRANITE_HYBRID, **MAMBA | {"mamba_n_groups": 2}),
    "granite-hybrid-moe": lambda: GraniteMoeHybridConfig(
        **NARROW | {"intermediate_size": 44},
        **GRANITE_HYBRID | {"num_local_experts": 7},
        **MAMBA,
        num_experts_per_tok=3,
    ),
    "falcon-h1": lambda: FalconH1Config(**FAMILY_SHAPE, **FALCON_H1, **MAMBA),
    "falcon-h1-norm": lambda: FalconH1Config(
        **FAMILY_SHAPE,
        **FALCON_H1,
        **MAMBA | {"mamba_n_groups": 2},
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        **TIED,
    ),
    "nemotron-h": lambda: NemotronHConfig(
        **{key: value for key, value in FAMILY_SHAPE.items() if key != "num_hidden_layers"},
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "mlp"],
        mamba_num_heads=10,
        mamba_head_dim=28,
        n_groups=5,
        ssm_state_size=20,
        chunk_size=16,
        time_step_min=1e-30,  # Transformers takes it as a bound of the time step, in prompts only
    ),
    "exaone4": lambda: Exaone4Config(**FAMILY_SHAPE, **WINDOW),
    "apertus": lambda: ApertusConfig(**FAMILY_SHAPE, attention_bias=True),
    "minimax-m3": lambda: MiniMaxM3VLTextConfig(
        **FAMILY_SHAPE | {"intermediate_size": 44},
        dense_intermediate_size=112,
        shared_intermediate_size=50,
        num_local_experts=7,
        num_experts_per_tok=3,
        swiglu_limit=1.0,
        partial_rotary_factor=0.5,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
        index_n_heads=5,
        index_block_size=16,
        index_topk_blocks=10,
        index_head_dim=16,
    ),
    "minimax-m3-pictures": lambda: MiniMaxM3VLConfig(
        text_config=CONFIGS["minimax-m3"]().to_dict(), vision_config=MINIMAX_VISION, projector_hidden_size=16
    ),
    "mimo-v2": lambda: MiMoV2FlashConfig(
        **FAMILY_SHAPE | {"head_dim": 18},
        **MOE,
        v_head_dim=12,
        n_routed_experts=7,
        sliding_window=8,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}
            for kind, theta, fraction in (("full_attention", 5e6, 0.334), ("sliding_attention", 1e4, 0.667))
        },
    ),
    "step3-pictures": lambda: Step3p7Config(
        text_config=FAMILY_SHAPE
        | MOE
        | {
            "n_routed_experts": 7,
            "share_expert_dim": 50,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "sliding_window": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "num_sliding_attention_heads": 15,
            "moe_router_scaling_factor": 1.8,
            "swiglu_limits": [0.0, 0.5, 0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.4, 0.3],
            "rope_theta": [5e6, 1e4, 1e4, 5e6],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        },
        vision_config=STEP_VISION,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **FAMILY_SHAPE | {"intermediate_size": 44},
        sliding_window=8,
        layer_types=WINDOW["layer_types"],
        num_local_experts=7,
        num_experts_per_tok=3,
        swiglu_limit=1.0,
        rope_parameters=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
}
"""Transformers' config of each kind of checkpoint: a new family is a line here and in ``FAMILIES``."""
KINDS = ("qwen2-tied", "qwen2-untied-sharded", "llama-untied", "llama-tied-biased")
MIXTURES = (
    "qwen3-moe",
    "qwen2-moe",
    "ernie4.5-moe",
    "hunyuan-moe",
    "glm4-moe",
    "glm4-moe-groups",
    "minimax-m2",
    "gpt-oss",
    "gemma4-moe",
)
LATENTS = (
    *("glm-4.7-flash", "deepseek-v2", "deepseek-v3", "deepseek-v3-plain", "kimi-k2", "deepseek-v2-lite", "minicpm3"),
)
"""In this order the sample of ``test_golden.py`` cuts 20 heads over 3 ranks."""
HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next-moe")
MAMBAS = ("granite-hybrid", "granite-hybrid-moe", "falcon-h1", "falcon-h1-norm", "nemotron-h")
"""Models with Mamba-2 layers."""
FURTHER = (
    *MAMBAS,
    "mixtral",
    "granite",
    "granite-moe",
    "exaone4",
    "gemma2",
    "apertus",
    "minimax-m3",
    "mimo-v2",
    "deepseek-v3.2",
    "glm-5",
    "hy3",
    "olmo2",
)
"""Families that run with the ``slow`` mark only; ``test_spellings.py`` always runs their published configs on one rank."""
FAMILIES = (
    *(
        "qwen3",
        "mistral",
        "ministral",
        "ministral3",
        "smollm3",
        "phi3",
        "phi4-mini",
        "phi4-mini-long",
        "olmo3",
        "seed-oss",
        "glm4",
    ),
    *("ernie4.5", "hunyuan", "gemma3", "gemma4", "gemma4-tied-values", "gemma4-layer-inputs"),
    *(*MIXTURES, *LATENTS, *HYBRIDS, *FURTHER),
)
SHARED_CACHES = "gemma4-shared-caches"
"""Its layers from the third on are all on the last stage, so that it does not go with every layout."""


def make_checkpoint(directory: Path, kind: str, seed: int = 0, **sizes: int) -> Path:
    """Write one of the named checkpoints into ``directory``; seeded, so that every process makes the same.

    Args:
        sizes: fields of the config that are other than those of this kind.
    """
    torch.manual_seed(sum(map(ord, kind)) + 10_000 * seed)
    config = CONFIGS[kind]()
    for name, size in sizes.items():
        setattr(config, name, size)
    model = auto_class(kind).from_config(config)
    randomize(model, norms=kind not in KINDS)
    model.save_pretrained(directory, max_shard_size="100KB" if "sharded" in kind else "5GB")
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, norms: bool = True) -> None:
    """Random biases and norms: Transformers starts them at zero and at one, where a forgotten one would not show.

    The row of the padding token as well: of zeros, all experts would be as good.
    """
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        embedding.weight[embedding.padding_idx].normal_(0.0, 0.2)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "sinks")):
            parameter.normal_(0.0, 0.2)
        elif ("norm" in name or name.endswith(("layer_scalar", "router.scale", "expert_scale"))) and norms:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def auto_class(kind: str) -> type:
    """The class of Transformers that makes models of this kind."""
    return AutoModelForImageTextToText if kind.endswith("pictures") else AutoModelForCausalLM


def architecture(kind: str) -> str:
    """The name of their class, as ``config.json`` has it."""
    return auto_class(kind)._model_mapping[type(CONFIGS[kind]())].__name__


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer with a Qwen2-style chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def mixed_prompts(count: int = 8, seed: int = 7) -> list[list[int]]:
    """Prompts of random ids, 1 to about 90 tokens long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 90, 17, 33, 5, 64, 16, 48][:count]
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def transformers_greedy(
    directory: Path, prompts: list[list[int]], num_tokens: int, auto: type = AutoModelForCausalLM
) -> list[dict]:
    """Transformers' own greedy continuation of each prompt, ignoring end-of-sequence, with the logits of each token."""
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack([step[0] for step in out.logits])
        results.append({"token_ids": out.sequences[0, len(prompt) :].tolist(), "logits": logits})
    return results


@torch.no_grad()
def transformers_logprobs(directory: Path, prompts: list[list[int]], **options) -> list[float]:
    """Transformers' own logprobs of the tokens of all prompts, but for each one's first; with options of its own."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    logprobs: list[float] = []
    for prompt in prompts:
        predicted = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        logprobs += [float(predicted[i, token]) for i, token in enumerate(prompt[1:])]
    return logprobs


@torch.no_grad()
def transformers_states(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Transformers' own hidden states of each prompt's tokens after the final norm: (T, D)."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


@torch.no_grad()
def transformers_beams(
    directory: Path, prompts: list[list[int]], num_beams: int, num_tokens: int
) -> list[list[list[int]]]:
    """Transformers' own answers to each prompt by beam search, the best first, ignoring end-of-sequence."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[:, len(prompt) :].tolist())
    return answers


@torch.no_grad()
def transformers_choices(
    directory: Path, sequences: list[list[int]], noise: float = 0.0
) -> tuple[dict[int, list[list[int]]], list[torch.Tensor]]:
    """What Transformers chooses for each token of these sequences.

    Args:
        noise: by how much embeddings are off, relative to what they are.

    Returns:
        By layer with experts, the token, its position and its experts in ascending order, for all tokens; and by sequence
        the logits, (T, V).
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    weight = model.get_input_embeddings().weight
    weight.mul_(1 + noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    choices: dict[int, list[list[int]]] = {}
    ran: list[int] = []

    def keep(number: int, arguments: tuple) -> None:
        ids_TA = arguments[1].sort(dim=-1).values.tolist()
        choices.setdefault(number, []).extend(
            [token, position, *ids] for position, (token, ids) in enumerate(zip(ran, ids_TA, strict=True))
        )

    for number, layer in enumerate(model.model.layers):
        places = (layer, getattr(layer, "mlp", None), getattr(layer, "block_sparse_moe", None))
        experts = next((place.experts for place in places if hasattr(place, "experts")), None)
        if experts is not None:
            experts.register_forward_pre_hook(lambda module, given, number=number: keep(number, given))
    logits = []
    for sequence in sequences:
        ran[:] = sequence
        logits.append(model(torch.tensor([sequence])).logits[0])
    return choices, logits


def worst_vector_error(vectors: list[list[float]], states: list[torch.Tensor], pooling: str) -> float:
    """Largest |difference| to the pooled states, relative to their largest number, over all vectors."""
    worst = 0.0
    for vector, states_TD in zip(vectors, states, strict=True):
        wanted_D = {"mean": states_TD.mean(dim=0), "cls": states_TD[0], "last": states_TD[-1]}[pooling]
        worst = max(worst, float((torch.tensor(vector) - wanted_D).abs().max() / wanted_D.abs().max()))
    return worst
