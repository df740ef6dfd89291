"""COMMANDS: the description and the flags of every command."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labinfer.api.batch.options import JobOptions, VerifyOptions
from labinfer.base.config import (
    SECTIONS,
    CacheOptions,
    ModelOptions,
    ParallelOptions,
    RuntimeOptions,
    SchedulerOptions,
    WeightCacheOptions,
)
from labinfer.base.registry import REGISTRY
from labinfer.base.sampling_options import SamplingOptions
from labinfer.cli.bench.options import (
    AccuracyOptions,
    BenchOptions,
    CheckDeviceOptions,
    FunctionBenchOptions,
    LatencyOptions,
    LoadOptions,
    ServeOptions,
)
from labinfer.cli.terminal.conversation import MANY_ANSWERS
from labinfer.cli.terminal.options import ChatOptions
from labinfer.planner.options import PlanOptions, ProbeOptions
from labinfer.planner.simulator.options import SimulateOptions
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.supervisor.options import SuperviseOptions

REPEATABLE = ("prompt", "stop", "api_key", "link", "step_sink")
"""Options whose flag may be given several times."""
SIMULATED = {
    *("dtype", "quantization", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "layers", "ranks"),
    *("block_size", "num_kv_blocks", "enable_prefix_caching", "prefix_cache_eviction", "snapshot_interval"),
    *("memory_utilization", "log_level", "trace"),
    *({f.name for f in dataclasses.fields(SchedulerOptions)} - {"speculative_config"}),
}
"""Engine options that ``launch.py simulate`` takes into account."""
MEASURING = (ModelOptions, ParallelOptions, CacheOptions, RuntimeOptions)
"""Sections of engine options for commands that load a model to measure it, and run no requests."""


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """Flags and description of a command.

    Args:
        description: first lines of the command's ``--help``.
        summary: the command's line in ``launch.py --help``; empty if that does not list the command.
        options: dataclasses whose fields are the command's flags.
        repeated: fields whose flags may be given several times.
        defaults: defaults that replace those of the dataclasses; an empty string means that the model's files or the server decide.
        left_out: fields of ``options`` that do not become flags of the command.
        positional: field whose value follows the command's name, without a flag; empty for none.
    """

    description: str
    summary: str = ""
    options: tuple[type, ...] = ()
    repeated: tuple[str, ...] = REPEATABLE
    defaults: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    positional: str = ""


COMMANDS = {
    "generate": CommandFlags(
        description="Distributed LLM inference: run prompts or a JSONL job. Every rank is started with the same command.",
        options=(JobOptions, SamplingOptions, *SECTIONS),
    ),
    "serve": CommandFlags(
        description="Serve models over the OpenAI and Anthropic APIs. Every rank is started with the same command.",
        summary="serve the OpenAI and Anthropic APIs over HTTP",
        options=(ServerOptions, *SECTIONS),
        repeated=(*REPEATABLE, "model"),
        left_out=("trace",),  # a server has no end of the run, when the trace would be written
    ),
    "chat": CommandFlags(
        description="Chat with a model in the terminal: one that these ranks load, or one behind a server (--url). Sampling parameters default "
        "to those of the checkpoint or the server; a reply may fill the context. /help in the chat lists its commands.",
        summary="chat with a model in the terminal",
        options=(ChatOptions, SamplingOptions, *SECTIONS),
        repeated=("stop", "step_sink"),
        defaults={"log_level": "warning"} | {f.name: "" for f in dataclasses.fields(SamplingOptions)},
        left_out=(*MANY_ANSWERS, "trace"),
    ),
    "supervise": CommandFlags(
        description="Restart a server or a job when its ranks die, as in launch.py supervise -- mpirun -n 2 python launch.py serve. "
        "Clients of a server see a pause instead of an error; a job resumes where it stopped.",
        summary="restart a server or a job when its ranks die",
        options=(SuperviseOptions,),
    ),
    "verify": CommandFlags(
        description="Recompute random output lines of a job that ran with --reproducible, on the layout of this launch, and compare all "
        "tokens and log-probabilities. The exit status is 0 only if all of them agree.",
        summary="recompute lines of a reproducible job, and compare all bits",
        options=(VerifyOptions, *SECTIONS),
        positional="job",
    ),
    "plan": CommandFlags(
        description="Show the layout (the layers, weights and KV cache of each rank) without loading the model; or, with --auto, choose one "
        "from measured costs.",
        summary="show or choose a layout: the layers and memory of each rank",
        options=(PlanOptions, *SECTIONS),
    ),
    "probe": CommandFlags(
        description="Measure how long the parts of a model take on these hosts, and the links between the hosts. Results are cached in "
        "~/.cache/labinfer.",
        summary="measure hosts and links, for plan and simulate",
        options=(ProbeOptions, *MEASURING),
        left_out=("layout",),
    ),
    "simulate": CommandFlags(
        description="Predict the results of bench serve: the same engine on a virtual clock, in one process, without loading a model. "
        "Speculative decoding is not simulated, because drafts depend on the tokens.",
        summary="predict the results of bench serve",
        options=(SimulateOptions, BenchOptions, LoadOptions, ServeOptions, *SECTIONS),
        left_out=tuple(f.name for section in SECTIONS for f in dataclasses.fields(section) if f.name not in SIMULATED),
    ),
    "cache": CommandFlags(
        description="List the disk cache of packed and quantized weights, from which later starts load.",
        summary="list or delete the disk cache of packed weights",
        options=(WeightCacheOptions,),
    ),
    "check-device": CommandFlags(
        description="Try every function, graph capture and collective of a device beside the reference on the CPU, at sizes that divide "
        "nothing, in every dtype. The exit status is 0 if all of them are right.",
        summary="try every function of a device beside the reference",
        options=(CheckDeviceOptions, ParallelOptions, RuntimeOptions),
        left_out=tuple(f.name for f in dataclasses.fields(ParallelOptions) if f.name != "device"),
    ),
    "bench latency": CommandFlags(
        description="Latency of a fixed batch, from its first request to its last token.",
        options=(BenchOptions, LatencyOptions, *SECTIONS),
    ),
    "bench throughput": CommandFlags(
        description="Requests and tokens per second, with all requests sent at the start.",
        options=(BenchOptions, LoadOptions, *SECTIONS),
    ),
    "bench serve": CommandFlags(
        description="Latency percentiles of requests that arrive at a given rate (open loop).",
        options=(BenchOptions, LoadOptions, ServeOptions, *SECTIONS),
    ),
    "bench comm": CommandFlags(
        description="Latency and bandwidth of the collectives and sends that the layout uses.",
        options=(ParallelOptions, RuntimeOptions),
        left_out=("layout",),
    ),
    "bench accuracy": CommandFlags(
        description="Accuracy of dtypes, quantized weights and KV cache dtypes (all of them, or those given as flags) against float32.",
        options=(AccuracyOptions, *MEASURING),
    ),
    "bench functions": CommandFlags(
        description="Time every kernel implementation at a model's sizes, and compare it with the roofline limits of this machine.",
        options=(FunctionBenchOptions, *MEASURING),
        left_out=("layout",),
    ),
}
"""Built-in commands by name. ``base/kinds.py`` names the function that runs each command."""


def commands() -> dict[str, CommandFlags]:
    """Flags of every command by name, from ``COMMANDS`` and plugins."""
    own = {name: entry.details for name, entry in REGISTRY.plugged_in("command").items()}
    return COMMANDS | {
        name: CommandFlags(
            description=details.get("help", ""),
            summary=details.get("help") or "command of a plugin",
            options=tuple(details.get("options", ())),
        )
        for name, details in own.items()
    }
