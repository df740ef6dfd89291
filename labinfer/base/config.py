"""User options: a frozen dataclass for each concern; each part of the program receives its own.

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
"""Other names of dtypes."""
LOADED_QUANTIZATIONS = ("awq", "gptq", "fp8", "compressed-tensors", "mxfp4", "gguf", "bitsandbytes", "marlin")
"""Beginnings of values of vLLM's ``--quantization`` that name the format of a checkpoint."""
QUANTIZATIONS = ("auto", "none", "int8", "int4")
AUTOTUNE = ("on", "off", "again")
WEIGHT_FORMS = ("auto", "plain", "packed12")
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
KV_CACHE_DTYPES = (*DTYPES, "int8")
EXPERT_CUTS = ("columns", "whole")
MAX_TIMEOUT = 1e9
"""Maximum timeout in seconds."""
MAX_PORT = 65535
TRANSPORTS = ("auto", "mpi", "torch")
AUTO_LAYOUT = "auto"
PLANNED = ("tensor_parallel_size", "pipeline_parallel_size", "layers", "ranks")
"""Options that ``--layout`` replaces."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The checkpoint, and the dtypes of its weights and activations."""

    model: str = option(
        "demo",
        "checkpoint: demo, the small one that comes with LABInfer; a directory, a GGUF file (of a split one the first), a name "
        "under $LABINFER_MODEL_DIR, a Hugging Face id, or an alias such as qwen2",
        metavar="DIR|FILE|NAME",
    )
    hub: str = option(
        "auto",
        "hub that a model given by its id or an alias is downloaded from; $HF_ENDPOINT may name a mirror of Hugging Face; auto takes "
        "$LABINFER_HUB, or huggingface",
        choices=("auto", "huggingface", "modelscope"),
    )
    tokenizer: str = option(
        "", "tokenizer directory, or a GGUF file that has one (default: the model's)", metavar="DIR"
    )
    chat_template: str = option(
        "",
        "Jinja file with another chat template, for conversations with tools, too (default: the checkpoint's)",
        metavar="FILE",
    )
    response_template: str = option(
        "",
        "how chat replies are read: one of the built-in formats (deepseek_v3, deepseek_v31, deepseek_v32, ernie, gemma4, glm, "
        "harmony, hermes, hunyuan, kimi, llama3, minimax, mistral, mistral_json, qwen_xml, think), a JSON file, or none "
        "(default: the checkpoint's own response_template, else the format that its chat template shows)",
        metavar="NAME|FILE",
    )
    dtype: tuple[str, ...] = option(
        ("auto",),
        "dtype of weights and activations, one for all stages or one per stage: " + "|".join(DTYPES),
        metavar="D[,D…]",
        spellings=DTYPE_SPELLINGS,
    )
    functions: tuple[str, ...] = option(
        ("auto",),
        "implementations by function, such as linear=reference, or one for all; auto takes the fastest",
        metavar="F=NAME[,…]",
    )
    autotune: str = option(
        "on",
        "measure at the start which implementations are the fastest on these ranks (16-bit models; remembered in "
        "~/.cache/labinfer, and measured once more where the machine was busy); again measures everything anew, costs of machines included; with off the "
        "preferred ones are taken, which are the compiled ones where there are any",
        choices=AUTOTUNE,
    )
    weights: str = option(
        "auto",
        "how weights in bfloat16 are held in memory, the experts of mixtures left out: plain as they are, or packed12 in 12 bits "
        "each without losing any, for the same numbers from three quarters of the bytes (on CPUs, with compiled functions); auto takes "
        "packed12 there, unless plain is measured to be faster by a tenth",
        choices=WEIGHT_FORMS,
    )
    quantization: tuple[str, ...] = option(
        ("auto",),
        "round the weights while they are loaded, for all stages or one per stage: int8 (a scale for each output, activations in "
        "8 bits too; for FP8 a scale for each 128 inputs), or int4 (a scale for each group of inputs, of 32 in the vocabulary); what "
        "a checkpoint holds in whole numbers stays as it is, but with none, which decodes it; auto rounds nothing",
        other_name="-q",
        metavar="|".join(QUANTIZATIONS) + "[,…]",
    )
    quantization_group_size: int = option(64, "inputs that share a scale in int4: 32, 64 or 128", metavar="N")
    ignore_tensors: tuple[str, ...] = option(
        (),
        "leave tensors of the checkpoint unread that the model has no place for, by their names: globs such as '*.aux_head.*' "
        "(default: such tensors are refused)",
        metavar="PATTERN[,…]",
    )
    max_model_len: int = option(0, "longest prompt + output in tokens (default: what the model allows)", metavar="N")
    sliding_window: int = option(
        0, "every layer sees only the last N tokens (default: as the checkpoint says)", metavar="N"
    )

    def hub_or(self, default: str) -> str:
        """Name of the hub that ``hub`` chooses, or ``default`` ($LABINFER_HUB) for auto."""
        return default if self.hub == "auto" else self.hub


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The layout: each rank's part of the model, and its device."""

    tensor_parallel_size: tuple[int, ...] = option(
        (1,),
        "tensor-parallel ranks: one number for every stage, or one per stage (2,1)",
        other_name="-tp",
        metavar="N[,N…]",
        least=1,
    )
    pipeline_parallel_size: int = option(
        0, "pipeline stages (default: as many as the ranks allow)", other_name="-pp", metavar="N"
    )
    layers: tuple[int, ...] = option((), "layers per stage, such as 14,10 (default: split evenly)", metavar="N[,N…]")
    experts: tuple[str, ...] = option(
        ("columns",),
        "how tensor-parallel ranks share a mixture's experts, for all stages or one per stage: columns (a part of each "
        "expert) or whole (some experts, where columns would get thin)",
        metavar="CUT[,CUT…]",
    )
    ranks: tuple[int, ...] = option(
        (),
        "the ranks of stage 0, then those of stage 1, …, such as 0,2,1; ranks that are left out are spare (default: all, "
        "counting up)",
        metavar="N[,N…]",
    )
    layout: str = option(
        "",
        "in place of -tp, -pp, --layers and --ranks: a plan that launch.py plan --auto --save wrote, or auto, which measures all machines "
        "(once; remembered in ~/.cache/labinfer) and chooses for throughput (default: by these flags)",
        metavar="FILE|auto",
    )
    device: tuple[str, ...] = option(
        ("auto",), "auto|cpu|cuda|npu|… for all stages, or one per stage", metavar="DEV[,DEV…]"
    )
    transport: str = option(
        "auto",
        "how bytes move between ranks: MPI, or torch.distributed (auto: MPI under an MPI launcher on CPUs; and sums of "
        "tensor-parallel CPUs through memory they share)",
        choices=TRANSPORTS,
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The paged KV cache, memory for experts, and packed weights on disk."""

    block_size: int = option(16, "tokens in one KV block", metavar="N", least=1)
    num_kv_blocks: int = option(0, "KV blocks on every rank (default: from free memory)", metavar="N")
    kv_cache_dtype: str = option(
        "auto",
        "dtype of cached keys and values (auto: each stage's --dtype); int8 has a scale for each token and head",
        choices=KV_CACHE_DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    enable_prefix_caching: bool = option(True, "find the tokens of earlier requests in the KV cache again")
    prefix_cache_eviction: str = option(
        "lru",
        "which unreferenced block of the prefix cache is evicted next: the least recently used one, or what a plugin chooses; "
        "also holds for snapshots of states and for a draft model's cache",
        choices=PREFIX_CACHE_EVICTIONS,
    )
    snapshot_interval: int = option(
        1024,
        "tokens from one snapshot of a sequence's state to the next, beside the one at its prompt's end; the prefix cache of "
        "models whose layers keep states goes on from there",
        metavar="N",
        least=1,
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory on every rank for preempted sequences (default: 4 where a rank uses an accelerator or "
        "--preemption-mode is swap; none where all use CPUs, as the KV cache has their memory already)",
        metavar="GIB",
    )
    expert_offload: float = option(
        0.0,
        "GiB of memory on every rank for the experts of a mixture: all are in a file in ~/.cache/labinfer, and those that were "
        "used last in memory (default: all in memory)",
        metavar="GIB",
    )
    weight_cache_size: float = option(
        20.0,
        "GiB of disk, in ~/.cache/labinfer, for packed and quantised weights, which the next start maps instead of making them "
        "again; launch.py cache shows them; 0 keeps none",
        metavar="GIB",
    )
    memory_utilization: float = option(
        0.8, "fraction of a device's free memory that weights and KV cache may take", metavar="F"
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduling: the way from requests to micro-batches."""

    max_num_seqs: int = option(64, "sequences running at once", metavar="N", least=1)
    max_num_batched_tokens: int = option(512, "tokens in one micro-batch at most", metavar="N", least=1)
    chunked_prefill_size: int = option(512, "tokens of one prompt in one micro-batch at most", metavar="N", least=1)
    max_queued_requests: int = option(0, "sequences that may wait; 0 for any number", metavar="N")
    scheduling_policy: str = option(
        "fcfs",
        "who is next: the first to come, the lowest priority, or the users in turn",
        choices=SCHEDULING_POLICIES,
    )
    batch_policy: str = option(
        "auto",
        "how work is split over micro-batches: balanced splits decodes evenly, throttle prompt tokens as well, greedy "
        "takes all there is, phases runs prompts and answers in turn; auto is throttle for several stages at work at "
        "once, else balanced",
        choices=BATCH_POLICIES,
    )
    preemption_mode: str = option(
        "auto",
        "what becomes of a preempted sequence: it is computed again, swapped to host memory (as far as --swap-space "
        "goes), or whichever was measured to be faster",
        choices=PREEMPTION_MODES,
    )
    context_shift: bool = option(
        False, "where the context is full, drop half of it and go on, instead of ending the answer"
    )
    keep: int = option(0, "tokens at the beginning that a context shift keeps, in whole blocks", metavar="N")
    pipeline_schedule: str = option(
        "1f1b",
        "1f1b keeps every stage busy; gpipe flushes; lockstep runs one batch at a time",
        choices=PIPELINE_SCHEDULES,
    )
    max_inflight: int = option(0, "micro-batches in flight (default: the number of stages)", metavar="N")
    speculative_config: SpeculativeOptions | None = option(
        None,
        "guess next tokens, and verify several in one step; answers are the same as without. A JSON object with vLLM's names: "
        "method, ngram, mtp, draft_model, or a plugin's; model, that drafts, and draft_rank, a spare rank for it; "
        "num_speculative_tokens, a number or auto; continuous, prompt_lookup_min and prompt_lookup_max; see docs/speculation.md",
        metavar="JSON",
    )

    @property
    def chooses_drafts(self) -> bool:
        """Whether draft lengths are chosen by measured step times."""
        return self.speculative_config is not None and not self.speculative_config.num_speculative_tokens

    @property
    def has_mtp(self) -> bool:
        """Whether the model's own MTP layer drafts."""
        return self.speculative_config is not None and self.speculative_config.method == MTP


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Behaviour of a rank on its machine."""

    threads: int = option(0, "CPU threads of a rank (default: its share of the node's cores)", metavar="N")
    log_level: str = option(
        "info",
        "what rank 0 says on standard error; debug adds every step (default: info; for --prompt, chat, plan without --auto warning)",
        choices=LOG_LEVELS,
    )
    timeout: float = option(300.0, "seconds a rank waits for a peer before it gives up and names it", metavar="S")
    port_range: str = option(
        "",
        "TCP ports that ranks listen on for those of other machines, for firewalls, such as 29600-29699 (default: any that is "
        "free); gloo, under torchrun and srun, takes those of the system besides, see docs/operations.md",
        metavar="LOW-HIGH",
    )
    fault_timeout: float = option(
        30.0,
        "seconds without a sign of life after which a process counts as stopped or cut off, is named, and the group ends; "
        "one that is only busy gives signs of life",
        metavar="S",
    )

    @property
    def ports(self) -> range:
        """Ports of ``port_range``; empty for any port.

        Raises:
            UserError: ``port_range`` is no range of ports.
        """
        if not self.port_range:
            return range(0)
        match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", self.port_range)
        low, high = map(int, match.groups()) if match else (0, 0)
        if not 0 < low <= high <= MAX_PORT:
            raise UserError(
                f"--port-range {self.port_range:.60}: give the lowest and the highest port, from 1 to {MAX_PORT}, as in 29600-29699"
            )
        return range(low, high + 1)


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Traces and records of steps."""

    trace: str = option(
        "",
        "write where the time of every step went on every rank to this file, at the end of a run; https://ui.perfetto.dev "
        "shows it",
        other_name="--profile",
        metavar="FILE",
    )
    step_sink: tuple[str, ...] = option(
        (),
        "hand every step of every rank to the sink of a plugin, with a text such as a file's path; may be given several times, see "
        "docs/extending.md",
        metavar="NAME[=TEXT]",
    )


@dataclass(frozen=True, kw_only=True)
class WeightCacheOptions:
    """Packed weights on disk."""

    clean: bool = option(False, "remove them all; what runs with them goes on")


GROUP_SECTIONS = (ParallelOptions, RuntimeOptions)
"""Sections whose options the ranks need to form a group."""
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
    """KV blocks in the plan of ``--layout``, which a start does not exceed; 0 without a plan, or if other options are given."""

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> EngineOptions:
        """Make options from ``{"model": …, "tensor_parallel_size": …}``, the form of ``LLM(**values)`` and of the
        flags.

        Raises:
            UserError: a key is unknown, or a value has the wrong type or is out of bounds.
        """
        remaining = {key: value for key, value in values.items() if value is not None}
        if layout := remaining.get("layout"):
            for name in PLANNED if layout == AUTO_LAYOUT else (*PLANNED, "dtype", "quantization"):
                if name in remaining:
                    raise UserError(f"--layout {layout} says what {flag_name(name)} is; leave one of them out")
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
        """Make options from only those ``values`` that belong to ``GROUP_SECTIONS``, in the form of ``from_flat``.

        Raises:
            UserError: as ``from_flat``.
        """
        names = [f.name for section in GROUP_SECTIONS for f in dataclasses.fields(section)]
        return cls.from_flat({name: values[name] for name in names if name in values})

    @property
    def weight_options(self) -> tuple[ModelOptions, ParallelOptions]:
        """Options that identify packed weights in the weight cache. They are equal with ``--autotune on`` and ``again``, and for
        every hub."""
        lasting = "off" if self.model.autotune == "off" else "on"
        return dataclasses.replace(self.model, autotune=lasting, hub="auto"), dataclasses.replace(
            self.parallel, layout=""
        )

    @property
    def working_ranks(self) -> tuple[int, ...]:
        """Ranks of ``--ranks`` and the spare rank that drafts for them; empty if all ranks work."""
        ranks, speculation = self.parallel.ranks, self.scheduler.speculative_config
        return (*ranks, speculation.draft_rank) if ranks and speculation and speculation.draft_rank else ranks

    def check(self) -> None:
        """Check the values that depend on neither model nor machine.

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
                    f"--step-sink {name}: there is no such sink; there are: {', '.join(known) or 'none, as a --plugin registers them'}"
                )
        if (size := self.model.quantization_group_size) not in QUANTIZATION_GROUP_SIZES:
            raise UserError(f"--quantization-group-size {size}: choose one of {join(QUANTIZATION_GROUP_SIZES)}")
        if self.model.weights == "packed12" and {"int8", "int4"} & set(self.model.quantization):
            given = join(self.model.quantization)
            raise UserError(
                f"--weights packed12 holds bfloat16 as it is, --quantization {given} rounds it; leave one out"
            )
        if not 0.0 < self.cache.memory_utilization <= 1.0:
            raise UserError(f"--memory-utilization must be above 0 and at most 1, not {self.cache.memory_utilization}")
        if self.parallel.layers and min(self.parallel.layers) < 1:
            raise UserError(f"--layers {join(self.parallel.layers)}: every stage needs at least one layer")
        if self.cache.swap_space and self.scheduler.preemption_mode == "recompute":
            raise UserError(f"--swap-space {self.cache.swap_space:g} is of no use with --preemption-mode recompute")
        if self.scheduler.keep and not self.scheduler.context_shift:
            raise UserError(f"--keep {self.scheduler.keep} says what --context-shift keeps; add --context-shift")
        self.runtime.ports  # noqa: B018 - raises UserError for a --port-range that is no range
        if not 0 < self.runtime.timeout < MAX_TIMEOUT:
            raise UserError(f"--timeout must be above 0 and under {MAX_TIMEOUT:g} seconds, not {self.runtime.timeout}")
        if not 2 <= self.runtime.fault_timeout < MAX_TIMEOUT:
            raise UserError(
                f"--fault-timeout must be at least 2 and under {MAX_TIMEOUT:g} seconds, not {self.runtime.fault_timeout}"
            )

    def check_group_size(self) -> None:
        """Check that ``--quantization-group-size`` has an effect. The option is kept if a layout changes, as a later
        layout may use int4.

        Raises:
            UserError: no stage is in int4.
        """
        size = self.model.quantization_group_size
        if size != ModelOptions.quantization_group_size and "int4" not in self.model.quantization:
            raise UserError(f"--quantization-group-size {size} is for int4 only; add --quantization int4")
