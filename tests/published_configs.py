"""``config.json`` of published mixtures and hybrids, as the hub has them but for what only training reads."""

from __future__ import annotations

from typing import Any

from published_latent import LATENT
from published_mixtures import MIXTURES
from published_qwen import QWEN
from published_recurrent import GRANITE_AND_MAMBA

NUM_LAYERS = 4
GEMMA_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
PUBLISHED: dict[str, dict[str, Any]] = {
    **QWEN,
    **LATENT,
    **MIXTURES,
    **GRANITE_AND_MAMBA,
    **{
        f"google/gemma-3-{name}": {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 262144,
            **sizes,
        }
        for name, sizes in {
            "270m-it": {
                "hidden_size": 640,
                "intermediate_size": 2048,
                "num_hidden_layers": 18,
                "layer_types": GEMMA_LAYERS * 3,
                "use_bidirectional_attention": False,
            },
            "1b-it": {
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "num_hidden_layers": 26,
                "sliding_window_pattern": 6,
            },
        }.items()
    },
    "allenai/OLMo-2-1124-7B-Instruct": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    },
    "LGAI-EXAONE/EXAONE-4.0-32B": {
        "architectures": ["Exaone4ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 361,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 27392,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 102400,
    },
    "google/gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256000,
    },
    "swiss-ai/Apertus-8B-Instruct-2509": {
        "architectures": ["ApertusForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 68,
        "hidden_act": "xielu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 21504,
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "model_type": "apertus",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 3,
        "post_norm": False,
        "qk_norm": True,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 12000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 131072,
    },
}
"""By the name on the hub."""
LARGER: dict[str, dict[str, Any]] = {
    "google/gemma-3-4b-it": PUBLISHED["google/gemma-3-1b-it"]
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    },
}
"""Further ones, whose sizes alone are checked; of the first one the text part."""

SMALL = {
    "vocab_size": 512,
    "hidden_size": 160,
    "intermediate_size": 112,
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 50,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_experts": 7,
    "num_local_experts": 7,
    "n_routed_experts": 7,
    "moe_num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_k": 3,
    "q_lora_rank": 28,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "shared_intermediate_size": 50,
    "mamba_n_heads": 10,
    "mamba_d_head": 32,
    "mamba_d_ssm": 320,
    "mamba_d_state": 20,
    "mamba_num_heads": 10,
    "mamba_head_dim": 28,
    "ssm_state_size": 20,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SMALL_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 160,
    "num_position_embeddings": 16,
}


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The same keys with small sizes and few layers, and weights in float32."""
    small = config | {key: value for key, value in SMALL.items() if config.get(key) is not None}
    if "kv_lora_rank" in config:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if config.get("n_group", 1) > 1:
        small |= {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}
    if (rope := config.get("rope_scaling")) and "long_factor" in rope:
        pairs = small["qk_rope_head_dim"] // 2
        small["rope_scaling"] = {
            key: value[:pairs] if isinstance(value, list) else value for key, value in rope.items()
        }
    small |= {
        key: value[:NUM_LAYERS]
        for key, value in config.items()
        if isinstance(value, list) and len(value) > 3 and key != "ssm_multipliers"
    }
    if "hybrid_override_pattern" in config:
        small |= {"hybrid_override_pattern": "M*-M", "n_groups": 5, "time_step_min": 1e-30}
    if "mamba" in config.get("layer_types", ()):
        small["layer_types"] = config["layer_types"][3 : 3 + NUM_LAYERS]  # one of them is attention
        small["num_local_experts"] = min(config["num_local_experts"], SMALL["num_local_experts"])
    if isinstance(small.get("moe_topk"), list):
        small["moe_topk"] = [3, 1, 2, 4]
    for key, values in (("text_config", None), ("vision_config", SMALL_VISION)):
        if key in config:
            small[key] = shrink(config[key]) if values is None else config[key] | values
    return small | {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
