"""The kinds of parts that are chosen by name, where the contract of each is written, and what ships of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parts.

    Args:
        contract: ``module:attribute`` of the class or type whose docstring says what a part must do.
        shipped: the parts that come with LABInfer: ``module:attribute`` by name.
        is_class: whether a part is a subclass of the contract; else it is any callable.
        details: names that ``register`` takes beside kind and name.
        check: ``module:attribute`` of a function that refuses a registration: ``check(name, part, details)`` raises ``UserError``.
        computes: whether parts decide what a model's layers compute. Packed weights and measured times are kept for each version of a
            plugin that adds such a part.
    """

    contract: str
    shipped: Mapping[str, str]
    is_class: bool = False
    details: tuple[str, ...] = ()
    check: str = ""
    computes: bool = False


MODEL_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "SeedOssForCausalLM": "seed_oss",
    "Glm4ForCausalLM": "glm4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "kimi_k2",
    "Kimi_K25ForConditionalGeneration": "kimi_k2",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "MiniCPM3ForCausalLM": "minicpm3",
    "GptOssForCausalLM": "gpt_oss",
}
"""Modules of ``labinfer.models`` by family: the name of its class, as ``architectures`` of ``config.json`` has it."""

KINDS: dict[str, Kind] = {
    "scheduling_policy": Kind(
        contract="labinfer.engine.policies:SchedulingPolicy",
        check="labinfer.engine.policies:check_prefill_key",
        details=("prefill_key",),
        shipped={name: f"labinfer.engine.policies:{name}" for name in ("fcfs", "priority", "fair")},
    ),
    "batch_policy": Kind(
        contract="labinfer.engine.policies:BatchPolicy",
        shipped={name: f"labinfer.engine.policies:{name}" for name in ("balanced", "throttle", "greedy", "phases")},
    ),
    "pipeline_schedule": Kind(
        contract="labinfer.engine.pipeline_schedule:PipelineSchedule",
        is_class=True,
        shipped={
            "1f1b": "labinfer.engine.pipeline_schedule:OneForwardOneBack",
            "gpipe": "labinfer.engine.pipeline_schedule:GPipe",
            "lockstep": "labinfer.engine.pipeline_schedule:Lockstep",
        },
    ),
    "prefix_cache_eviction": Kind(
        contract="labinfer.engine.eviction:Eviction", is_class=True, shipped={"lru": "labinfer.engine.eviction:LRU"}
    ),
    "model_family": Kind(
        contract="labinfer.models.decoder:Decoder",
        computes=True,
        is_class=True,
        shipped={name: f"labinfer.models.{module}:{name}" for name, module in MODEL_FAMILIES.items()},
    ),
    "command": Kind(
        contract="labinfer.cli.commands.session:Command",
        check="labinfer.cli.flags:check_command",
        details=("help", "options"),
        shipped={
            **{
                name: f"labinfer.cli.commands.{name}:run"
                for name in ("generate", "serve", "chat", "probe", "cache", "simulate")
            },
            "supervise": "labinfer.cli.commands.supervise:run",
            "plan": "labinfer.cli.commands.layout:run",
            **{
                f"bench {kind}": "labinfer.cli.commands.bench_engine:run" for kind in ("latency", "throughput", "serve")
            },
            **{
                f"bench {kind}": f"labinfer.cli.commands.bench_{kind}:run" for kind in ("comm", "accuracy", "functions")
            },
        },
    ),
    "step_sink": Kind(contract="labinfer.worker.step_sink:StepSink", is_class=True, shipped={}),
    "proposer": Kind(
        contract="labinfer.engine.proposer:Proposer",
        shipped={name: f"labinfer.engine.{name}_proposer:make_proposer" for name in ("ngram", "mtp")},
    ),
    "logits_processor": Kind(
        contract="labinfer.worker.logits_processors.processor:LogitsProcessor",
        shipped={
            name: f"labinfer.worker.logits_processors.{module}:{name}"
            for module, names in {
                "constraints": ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
                "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
                "thinking_budget": ("thinking_budget",),
            }.items()
            for name in names
        },
        details=("parameter",),
        check="labinfer.requests.parameter_names:check_registration",
    ),
    "function_provider": Kind(
        contract="labinfer.functions.provider:Provider",
        computes=True,
        is_class=True,
        shipped={
            "reference": "labinfer.functions.reference.provider:ReferenceProvider",
            "cpu": "labinfer.functions.cpu.provider:CpuProvider",
            "cuda": "labinfer.functions.cuda.provider:CudaProvider",
        },
    ),
    "weight_format": Kind(
        contract="labinfer.weights.formats.registry:WeightFormat",
        computes=True,
        shipped={
            "fp8": "labinfer.weights.formats.fp8:read_fp8",
            "compressed-tensors": "labinfer.weights.formats.compressed_tensors:read_compressed_tensors",
            "gptq": "labinfer.weights.formats.gptq:read_gptq",
            "awq": "labinfer.weights.formats.awq:read_awq",
            "mxfp4": "labinfer.weights.formats.mxfp4:read_mxfp4",
        },
    ),
}
"""Kinds by name."""
