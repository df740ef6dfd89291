"""Kinds: exchangeable parts that a user chooses by name (policies, model families …), with the contract of each kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of exchangeable parts that a user chooses by name, such as scheduling policies or model families.

    Args:
        contract: ``module:attribute`` of the class or type whose docstring says what a part must do.
        shipped: the parts that come with LABInfer: ``module:attribute`` by name.
        is_class: whether a part must be a subclass of the contract; otherwise it may be any callable.
        details: keyword arguments of ``register`` in addition to kind and name.
        check: ``module:attribute`` of a function that refuses a registration: ``check(name, part, details)`` raises ``UserError``.
        computes: whether parts decide what a model's layers compute. Packed weights and measured times are then cached for each
            version of a plugin that adds such a part.
    """

    contract: str
    shipped: Mapping[str, str]
    is_class: bool = False
    details: tuple[str, ...] = ()
    check: str = ""
    computes: bool = False


_MODELS = Path(__file__).parents[1] / "models"
MODEL_FAMILIES = {
    name: ".".join(path.relative_to(_MODELS).with_suffix("").parts)
    for path in (*sorted(_MODELS.glob("*.py")), *sorted(_MODELS.glob("families/*.py")))
    for name in re.findall(
        r"^class (\w+For(?:CausalLM|ConditionalGeneration))\(", path.read_text(encoding="utf-8"), re.M
    )
}
"""Module in ``labinfer.models`` that implements a model family, by class name as in ``architectures`` of ``config.json``. The classes are found in
the source, because importing the modules would import torch."""

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
                for name in ("generate", "serve", "chat", "verify", "probe", "cache", "simulate")
            },
            "supervise": "labinfer.cli.commands.supervise:run",
            "check-device": "labinfer.cli.commands.check_device:run",
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
            "npu": "labinfer.functions.npu.provider:NpuProvider",
        },
    ),
    "model_files": Kind(
        contract="labinfer.weights.model_files:ModelFiles",
        computes=True,
        is_class=True,
        shipped={
            "directory": "labinfer.weights.hugging_face.directory:HuggingFaceDirectory",
            "gguf": "labinfer.weights.gguf.model:GgufModel",
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
            "mxfp8": "labinfer.weights.formats.fp8:read_mxfp8",
            "modelopt": "labinfer.weights.formats.modelopt:read_modelopt",
        },
    ),
}
"""All kinds of exchangeable parts, by the name that ``register`` takes."""
