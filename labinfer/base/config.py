"""User options: a frozen dataclass for each part of the program, which receives only that dataclass.

The command-line flags (``labinfer/cli/main.py``) and the keyword arguments of ``LLM`` are generated from these classes,
so an option is written down once. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.option_fields import check_bounds, convert_section, flag_name, join, option
from labinfer.base.registry import REGISTRY, Names
from labinfer.base.speculative_options import MTP, SpeculativeOptions

PIPELINE_SCHEDULES = Names("pipeline_schedule")
SCHEDULING_POLICIES = Names("scheduling_policy")
BATCH_POLICIES = Names("batch_policy", "auto")
PREFIX_CACHE_EVICTIONS = Names("prefix_cache_eviction")
PREEMPTION_MODES = ("auto", "recompute", "swap")
LOG_LEVELS = ("debug", "info", "warning")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = ("auto", *FLOAT_DTYPES)
DTYPE_SPELLINGS = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
"""Short names of dtypes, each with the full name that it stands for."""
LOADED_QUANTIZATIONS = ("awq", "gptq", "fp8", "compressed-tensors", "modelopt", "mxfp4", "mxfp8", "gguf")
"""Values of vLLM's ``--quantization`` (their prefixes) that are accepted and have no effect: a checkpoint's files tell its
format."""
HUB_NAMES = ("huggingface", "modelscope")
DEFAULT_HUB = HUB_NAMES[0]
QUANTIZATIONS = ("auto", "none", "int8", "int4")
AUTOTUNE = ("on", "off", "again")
WEIGHT_FORMS = ("auto", "plain", "packed12")
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
KV_CACHE_DTYPES = (*DTYPES, "int8")
EXPERT_CUTS = ("columns", "whole")
MAX_TIMEOUT = 1e9
"""Maximum of ``--timeout`` and ``--fault-timeout``, in seconds."""
MAX_PORT = 65535
TRANSPORTS = ("auto", "mpi", "torch")
AUTO_LAYOUT = "auto"
PLANNED = ("tensor_parallel_size", "pipeline_parallel_size", "layers", "ranks")
"""Options that a layout file or ``--layout auto`` sets, so that they may not be given with ``--layout``."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The checkpoint, and the dtypes of its weights and activations."""

    model: str = option(
        "demo",
        "checkpoint: a directory, a GGUF file (the first part of a split one), a name under $LABINFER_MODEL_DIR, a "
        "Hugging Face id, an alias such as qwen2, or demo, the small model that comes with LABInfer",
        metavar="DIR|FILE|NAME",
    )
    hub: str = option(
        "auto",
        "model hub from which ids and aliases are downloaded; $HF_ENDPOINT sets a mirror of Hugging Face; auto takes "
        "$LABINFER_HUB, or huggingface",
        choices=("auto", *HUB_NAMES),
    )
    tokenizer: str = option(
        "", "tokenizer directory, or a GGUF file that contains one (default: the model's)", metavar="DIR"
    )
    chat_template: str = option(
        "", "Jinja file with the chat template, used for tool calls as well (default: the checkpoint's)", metavar="FILE"
    )
    response_template: str = option(
        "",
        "format by which reasoning and tool calls are parsed from chat replies: a JSON file, none, or one of "
        "deepseek_v3, deepseek_v31, deepseek_v32, ernie, gemma4, glm, granite, harmony, hermes, hunyuan, kimi, llama3, "
        "minimax, mistral, mistral_json, qwen_xml, think (default: the checkpoint's response_template, else "
        "detected from its chat template)",
        metavar="NAME|FILE",
    )
    reranker: str = option(
        "auto",
        "template and tokens by which pairs of query and document are scored: qwen3 reads a causal language model (Qwen3-Reranker) "
        "by the logits of yes and no, and gives a classifier converted from it the same template; auto scores as the "
        "checkpoint's files say",
        choices=("auto", "qwen3"),
    )
    dtype: tuple[str, ...] = option(
        ("auto",),
        "dtype of weights and activations, one for all stages or one per stage: " + "|".join(DTYPES),
        metavar="D[,D…]",
        spellings=DTYPE_SPELLINGS,
    )
    functions: tuple[str, ...] = option(
        ("auto",),
        "kernel implementation per function, such as linear=reference, or one name for all functions; auto takes "
        "the fastest",
        metavar="F=NAME[,…]",
    )
    autotune: str = option(
        "on",
        "time the kernels at startup and use the fastest (16-bit models; results are cached in ~/.cache/labinfer); "
        "again ignores cached kernel timings and cached probe measurements; off uses compiled kernels wherever they "
        "exist",
        choices=AUTOTUNE,
    )
    reproducible: str = option(
        "off",
        "with on, a request's logits and tokens on CPUs have the same bits alone and in any batch, at every start and on up to 4 "
        "tensor-parallel ranks, as no kernel is chosen by timing; with any-cpu, the bits are also equal on all x86 CPUs with AVX2",
        choices=("off", "on", "any-cpu"),
    )
    weights: str = option(
        "auto",
        "storage of bfloat16 weights in memory: plain, or packed12, a lossless compression to 12 bits (on CPUs; MoE "
        "experts stay plain); auto takes packed12 on CPUs unless plain is measured to be 10 % faster",
        choices=WEIGHT_FORMS,
    )
    quantization: tuple[str, ...] = option(
        ("auto",),
        "quantize the weights on load, for all stages or one value per stage: int8 (per-channel scales, 8-bit "
        "activations) or int4 (per-group scales); auto does not quantize; a checkpoint that is already quantized is "
        "left unchanged, except with the value 'none', which dequantizes it",
        other_name="-q",
        metavar="|".join(QUANTIZATIONS) + "[,…]",
    )
    quantization_group_size: int = option(
        64, "group size of int4, the number of inputs that share a scale: 32, 64 or 128", metavar="N"
    )
    ignore_tensors: tuple[str, ...] = option(
        (),
        "skip checkpoint tensors that the model does not use, by glob patterns such as '*.aux_head.*' (default: an "
        "unused tensor is an error)",
        metavar="PATTERN[,…]",
    )
    max_model_len: int = option(
        0, "context length: maximum prompt plus output, in tokens (default: the model's maximum)", metavar="N"
    )
    sliding_window: int = option(
        0, "sliding-window attention over the last N tokens in every layer (default: as in the checkpoint)", metavar="N"
    )

    @property
    def is_reproducible(self) -> bool:
        """Whether ``--reproducible`` is on."""
        return self.reproducible != "off"

    def hub_or(self, default: str) -> str:
        """Name of the hub to download models from: ``default`` (the value of $LABINFER_HUB) if ``hub`` is ``auto``,
        else ``hub``."""
        return default if self.hub == "auto" else self.hub


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The layout: stages, tensor parallelism and devices."""

    tensor_parallel_size: tuple[int, ...] = option(
        (1,),
        "tensor-parallel ranks per stage: one number for all stages, or one per stage (2,1)",
        other_name="-tp",
        metavar="N[,N…]",
        least=1,
    )
    pipeline_parallel_size: int = option(
        0, "number of pipeline stages (default: as many as the ranks allow)", other_name="-pp", metavar="N"
    )
    layers: tuple[int, ...] = option(
        (), "number of layers per stage, such as 14,10 (default: an even split)", metavar="N[,N…]"
    )
    experts: tuple[str, ...] = option(
        ("columns",),
        "how the tensor-parallel ranks shard MoE experts, for all stages or one value per stage: columns (a slice "
        "of every expert) or whole (complete experts, better where slices would be too narrow)",
        metavar="CUT[,CUT…]",
    )
    ranks: tuple[int, ...] = option(
        (),
        "ranks by stage: first those of stage 0, then those of stage 1, …, such as 0,2,1; omitted ranks are spare "
        "(default: all ranks, ascending)",
        metavar="N[,N…]",
    )
    layout: str = option(
        "",
        "layout that replaces -tp, -pp, --layers and --ranks: a file written by launch.py plan --auto --save, or "
        "auto, which measures all hosts once (cached in ~/.cache/labinfer) and plans for throughput (default: these "
        "flags)",
        metavar="FILE|auto",
    )
    device: tuple[str, ...] = option(
        ("auto",),
        "device for all stages, or one per stage (probe, bench comm, --layout auto: one per rank): auto, cpu, cuda, npu, …",
        metavar="DEV[,DEV…]",
    )
    transport: str = option(
        "auto",
        "communication backend: MPI or torch.distributed (auto: MPI under an MPI launcher on CPUs; all-reduce "
        "between CPU ranks of a node uses shared memory)",
        choices=TRANSPORTS,
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The paged KV cache, memory for MoE experts, and the disk cache of packed weights."""

    block_size: int = option(
        0, "tokens per KV cache block (default: as the devices' kernels prefer, 16 on CPUs and GPUs)", metavar="N"
    )
    num_kv_blocks: int = option(
        0, "KV cache blocks per rank (default: as many as fit into --memory-utilization)", metavar="N"
    )
    kv_cache_dtype: str = option(
        "auto",
        "dtype of cached keys and values; auto is each stage's --dtype, int8 has one scale per token and head",
        choices=KV_CACHE_DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    enable_prefix_caching: bool = option(True, "reuse KV cache blocks of earlier requests that share a prefix")
    prefix_cache_eviction: str = option(
        "lru",
        "eviction policy of the prefix cache: lru, or a plugin's; it also applies to snapshots of recurrent states "
        "and to a draft model's cache",
        choices=PREFIX_CACHE_EVICTIONS,
    )
    snapshot_interval: int = option(
        1024,
        "tokens between two snapshots of a sequence's recurrent state, from which prefix caching resumes "
        "(models with linear-attention layers); the end of each prompt gets a snapshot as well",
        metavar="N",
        least=1,
    )
    swap_space: float = option(
        0.0,
        "host memory per rank for swapped sequences, in GiB (default: 4 if a rank uses an accelerator or "
        "--preemption-mode is swap, else 0)",
        metavar="GIB",
    )
    expert_offload: float = option(
        0.0,
        "memory per rank for MoE experts, in GiB: all experts are kept in a file in ~/.cache/labinfer, the recently "
        "used ones in memory (default: all in memory)",
        metavar="GIB",
    )
    weight_cache_size: float = option(
        20.0,
        "disk cache of packed and quantized weights in ~/.cache/labinfer, in GiB; later starts map the weights "
        "instead of packing them again; 0 disables it; launch.py cache lists it",
        metavar="GIB",
    )
    memory_utilization: float = option(0.8, "fraction of a device's free memory for weights and KV cache", metavar="F")

    @property
    def tokens_per_block(self) -> int:
        """Tokens per KV block: ``block_size``, or 16 if ``block_size`` is 0. A launch replaces 0 by the size that its devices prefer."""
        return self.block_size or 16


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduling of requests into micro-batches."""

    max_num_seqs: int = option(64, "maximum number of running sequences", metavar="N", least=1)
    max_num_batched_tokens: int = option(512, "maximum number of tokens in a micro-batch", metavar="N", least=1)
    chunked_prefill_size: int = option(
        512, "maximum size of a prefill chunk: tokens of one prompt in a micro-batch", metavar="N", least=1
    )
    max_queued_requests: int = option(0, "maximum number of waiting sequences; 0 for no limit", metavar="N")
    scheduling_policy: str = option(
        "fcfs",
        "queue order: first come first served, by priority (lowest value first), or round-robin over users",
        choices=SCHEDULING_POLICIES,
    )
    batch_policy: str = option(
        "auto",
        "how work is divided into micro-batches: balanced (decodes evenly), throttle (decodes and prompt tokens "
        "evenly), greedy (as much as fits) or phases (prefill and decode alternate); auto is throttle if several "
        "stages work at once, else balanced",
        choices=BATCH_POLICIES,
    )
    preemption_mode: str = option(
        "auto",
        "recompute preempted sequences, or swap them to host memory (within --swap-space); auto picks the faster",
        choices=PREEMPTION_MODES,
    )
    context_shift: bool = option(
        False, "when the context is full, drop half of it and continue instead of ending the output"
    )
    keep: int = option(
        0, "tokens at the start of the context that a context shift keeps, rounded to whole blocks", metavar="N"
    )
    pipeline_schedule: str = option(
        "1f1b",
        "1f1b (as many micro-batches in flight as stages), gpipe (fill, then drain) or lockstep (one micro-batch at "
        "a time)",
        choices=PIPELINE_SCHEDULES,
    )
    max_inflight: int = option(
        0, "maximum number of micro-batches in flight (default: the number of stages)", metavar="N"
    )
    speculative_config: SpeculativeOptions | None = option(
        None,
        "lossless speculative decoding: a JSON object with vLLM's keys method (ngram, mtp, draft_model or a plugin's), model, "
        "num_speculative_tokens (a number or auto), prompt_lookup_min and prompt_lookup_max, and with draft_rank (rank of the "
        "draft model) and continuous (true: idle stages verify further drafts of a sequence); see docs/speculation.md",
        metavar="JSON",
    )

    @property
    def chooses_drafts(self) -> bool:
        """Whether draft lengths are chosen at run time, from measured step times."""
        return self.speculative_config is not None and not self.speculative_config.num_speculative_tokens

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint's own MTP layer (multi-token prediction) drafts tokens."""
        return self.speculative_config is not None and self.speculative_config.method == MTP


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Threads, logs, timeouts and network ports of a rank."""

    threads: int = option(0, "CPU threads per rank (default: its share of the node's cores)", metavar="N")
    log_level: str = option(
        "info",
        "log level of rank 0 on standard error; debug logs every step (default: info; warning for --prompt, chat, "
        "and plan without --auto)",
        choices=LOG_LEVELS,
    )
    timeout: float = option(
        300.0, "seconds that a rank waits for a peer before it fails with an error that names the peer", metavar="S"
    )
    port_range: str = option(
        "",
        "TCP ports for connections between ranks on different hosts, for firewalls, such as 29600-29699; gloo "
        "(torchrun, srun) uses other ports as well, see docs/operations.md (default: any free port)",
        metavar="LOW-HIGH",
    )
    fault_timeout: float = option(
        30.0,
        "heartbeat timeout in seconds: a process that is silent for this long is reported and the job is aborted; "
        "busy processes keep sending heartbeats",
        metavar="S",
    )

    @property
    def ports(self) -> range:
        """The ports in ``port_range``; empty if any port may be used.

        Raises:
            UserError: ``port_range`` is not a range of ports.
        """
        if not self.port_range:
            return range(0)
        match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", self.port_range)
        low, high = map(int, match.groups()) if match else (0, 0)
        if not 0 < low <= high <= MAX_PORT:
            raise UserError(
                f"--port-range {self.port_range:.60}: give LOW-HIGH with ports from 1 to {MAX_PORT}, as in 29600-29699"
            )
        return range(low, high + 1)


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Traces, and sinks that receive the record of each step."""

    trace: str = option(
        "",
        "at the end of a run, write a timeline of every step on every rank to this file, for https://ui.perfetto.dev",
        other_name="--profile",
        metavar="FILE",
    )
    step_sink: tuple[str, ...] = option(
        (),
        "pass every step of every rank to a plugin's step sink, with an optional argument such as a file path; "
        "repeatable, see docs/extending.md",
        metavar="NAME[=TEXT]",
    )


@dataclass(frozen=True, kw_only=True)
class WeightCacheOptions:
    """Options of ``launch.py cache``, which lists or deletes the packed weights on disk."""

    clean: bool = option(False, "delete all cached weights; running processes keep theirs")


GROUP_SECTIONS = (ParallelOptions, RuntimeOptions)
"""Sections with the options that ranks need before they can form a group; they need ``--reproducible``, too."""
SECTIONS = (ModelOptions, ParallelOptions, CacheOptions, SchedulerOptions, RuntimeOptions, ObserveOptions)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine, by section."""

    model: ModelOptions = ModelOptions()
    parallel: ParallelOptions = ParallelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    runtime: RuntimeOptions = RuntimeOptions()
    observe: ObserveOptions = ObserveOptions()
    planned_blocks: int = 0
    """Maximum number of KV blocks, as planned in the file of ``--layout``; 0 for no maximum."""

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> EngineOptions:
        """Make options from ``{"model": …, "tensor_parallel_size": …}``: keyword arguments of ``LLM``, or flags.

        Raises:
            UserError: a key is unknown, or a value has the wrong type or is out of bounds.
        """
        remaining = {key: value for key, value in values.items() if value is not None}
        if layout := remaining.get("layout"):
            for name in PLANNED if layout == AUTO_LAYOUT else (*PLANNED, "dtype", "quantization"):
                if name in remaining:
                    raise UserError(f"--layout {layout} already sets {flag_name(name)}; leave one of them out")
        sections = {}
        names = [f.name for f in dataclasses.fields(cls) if isinstance(f.default, SECTIONS)]
        for name, section in zip(names, SECTIONS, strict=True):
            chosen = {f.name: remaining.pop(f.name) for f in dataclasses.fields(section) if f.name in remaining}
            sections[name] = convert_section(section, chosen)
        if remaining:
            known = ", ".join(sorted(f.name for section in SECTIONS for f in dataclasses.fields(section)))
            raise UserError(f"unknown option {sorted(remaining)[0]!r}; known options: {known}")
        options = cls(**sections)
        options.check()
        if not options.parallel.layout:  # a layout may set int4
            options.check_group_size()
        return options

    @classmethod
    def group_options(cls, values: Mapping[str, Any]) -> EngineOptions:
        """Make options from the ``values`` of ``GROUP_SECTIONS`` and ``--reproducible``; all other options have their defaults.

        Raises:
            UserError: see ``from_flat``.
        """
        names = ["reproducible", *(f.name for section in GROUP_SECTIONS for f in dataclasses.fields(section))]
        return cls.from_flat({name: values[name] for name in names if name in values})

    @property
    def weight_options(self) -> tuple[ModelOptions, ParallelOptions]:
        """Options that identify packed weights in the weight cache. ``--autotune again`` counts as ``on``, and
        ``--hub`` is left out: neither changes the packed weights."""
        lasting = "off" if self.model.autotune == "off" else "on"
        model = dataclasses.replace(self.model, autotune=lasting, hub="auto")
        return model, dataclasses.replace(self.parallel, layout="")

    @property
    def working_ranks(self) -> tuple[int, ...]:
        """Ranks that work: those of ``--ranks`` and the spare rank with the draft model, if any; empty for all ranks."""
        ranks, speculation = self.parallel.ranks, self.scheduler.speculative_config
        return (*ranks, speculation.draft_rank) if ranks and speculation and speculation.draft_rank else ranks

    def check(self) -> None:
        """Check values of options that depend neither on the model nor on the machine.

        Raises:
            UserError: a value is wrong.
        """
        for section in (self.model, self.parallel, self.cache, self.scheduler, self.runtime, self.observe):
            check_bounds(section)
        for dtype in self.model.dtype:
            if dtype not in DTYPES:
                raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
        for quantization in self.model.quantization:
            if quantization.startswith(LOADED_QUANTIZATIONS):
                raise UserError(
                    f"--quantization {quantization}: leave it out for a checkpoint in this format, which is recognized by its files; to "
                    f"quantize on load, choose one of {', '.join(QUANTIZATIONS)}"
                )
            if quantization not in QUANTIZATIONS:
                raise UserError(f"--quantization {quantization}: choose one of {', '.join(QUANTIZATIONS)}")
        for cut in self.parallel.experts:
            if cut not in EXPERT_CUTS:
                raise UserError(f"--experts {cut}: choose one of {', '.join(EXPERT_CUTS)}")
        for sink in self.observe.step_sink:
            if (name := sink.partition("=")[0]) not in (known := REGISTRY.names("step_sink")):
                raise UserError(
                    f"--step-sink {name}: unknown sink; registered sinks: "
                    f"{', '.join(known) or 'none; a --plugin registers them'}"
                )
        if (size := self.model.quantization_group_size) not in QUANTIZATION_GROUP_SIZES:
            raise UserError(f"--quantization-group-size {size}: choose one of {join(QUANTIZATION_GROUP_SIZES)}")
        if self.model.weights == "packed12" and {"int8", "int4"} & set(self.model.quantization):
            given = join(self.model.quantization)
            raise UserError(
                f"--weights packed12 stores unquantized bfloat16 weights, --quantization {given} quantizes them; "
                "leave one out"
            )
        if not 0.0 < self.cache.memory_utilization <= 1.0:
            raise UserError(f"--memory-utilization must be above 0 and at most 1, not {self.cache.memory_utilization}")
        if self.parallel.layers and min(self.parallel.layers) < 1:
            raise UserError(f"--layers {join(self.parallel.layers)}: every stage needs at least one layer")
        if self.cache.swap_space and self.scheduler.preemption_mode == "recompute":
            raise UserError(
                f"--swap-space {self.cache.swap_space:g} has no effect with --preemption-mode recompute; leave one of "
                "them out"
            )
        if self.scheduler.keep and not self.scheduler.context_shift:
            raise UserError(f"--keep {self.scheduler.keep} needs --context-shift; add it")
        self.runtime.ports  # noqa: B018 - raises UserError for a --port-range that is no range
        if not 0 < self.runtime.timeout < MAX_TIMEOUT:
            raise UserError(f"--timeout must be above 0 and under {MAX_TIMEOUT:g} seconds, not {self.runtime.timeout}")
        if not 2 <= self.runtime.fault_timeout < MAX_TIMEOUT:
            raise UserError(
                f"--fault-timeout must be at least 2 and under {MAX_TIMEOUT:g} seconds, not {self.runtime.fault_timeout}"
            )

    def check_group_size(self) -> None:
        """Check that ``--quantization-group-size`` has an effect, that is, that a stage is quantized to int4. Not
        called again when the layout changes: a later layout may use int4.

        Raises:
            UserError: no stage is in int4.
        """
        size = self.model.quantization_group_size
        if size != ModelOptions.quantization_group_size and "int4" not in self.model.quantization:
            raise UserError(f"--quantization-group-size {size} is for int4 only; add --quantization int4")
