"""COMMANDS: the description and the flags of every command."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labinfer.api.batch.options import JobOptions
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

REPEATED = ("prompt", "stop", "api_key", "link", "step_sink")
"""Flags that may be given several times."""
SIMULATED = {
    *("dtype", "quantization", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "layers", "ranks"),
    *("block_size", "num_kv_blocks", "enable_prefix_caching", "prefix_cache_eviction", "snapshot_interval"),
    *("memory_utilization", "log_level", "trace"),
    *({f.name for f in dataclasses.fields(SchedulerOptions)} - {"speculative_config"}),
}
"""Engine options that affect a simulation."""
MEASURING = (ModelOptions, ParallelOptions, CacheOptions, RuntimeOptions)
"""Option sections of commands that load a model but serve no requests."""


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """Flags and description of a command.

    Args:
        description: first lines of the command's ``--help``.
        summary: the command's line in the program's ``--help``; empty for no line.
        options: dataclasses whose fields are the command's flags.
        repeated: fields whose flags may be given several times.
        defaults: defaults that differ from the dataclasses'; an empty string leaves the option to the model or its server.
        left_out: fields that are no flags of the command.
    """

    description: str
    summary: str = ""
    options: tuple[type, ...] = ()
    repeated: tuple[str, ...] = REPEATED
    defaults: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


COMMANDS = {
    "generate": CommandFlags(
        description="Distributed large-language-model inference. The same command starts every rank.",
        options=(JobOptions, SamplingOptions, *SECTIONS),
    ),
    "serve": CommandFlags(
        description="Serve models over OpenAI's API. The same command starts every rank.",
        summary="OpenAI's API over HTTP",
        options=(ServerOptions, *SECTIONS),
        repeated=(*REPEATED, "model"),
        left_out=("trace",),  # written at the end of a run
    ),
    "chat": CommandFlags(
        description="Talk to a model in the terminal: one on these ranks, or one that is served. Sampling that is not given is as the "
        "checkpoint or the server would have it, and an answer may fill the context. In the chat, /help lists the commands.",
        summary="talk to a model in the terminal",
        options=(ChatOptions, SamplingOptions, *SECTIONS),
        repeated=("stop", "step_sink"),
        defaults={"log_level": "warning"} | {f.name: "" for f in dataclasses.fields(SamplingOptions)},
        left_out=(*MANY_ANSWERS, "trace"),
    ),
    "supervise": CommandFlags(
        description="Start a server or a job again when its ranks die, as in launch.py supervise -- mpirun -n 2 python launch.py serve. "
        "A server's clients see a pause, and no error; a job goes on where it was.",
        summary="start a server or a job again when its ranks die",
        options=(SuperviseOptions,),
    ),
    "plan": CommandFlags(
        description="Show which rank would hold what, without loading anything; or, with --auto, choose it by measured costs.",
        summary="show which rank would hold what",
        options=(PlanOptions, *SECTIONS),
    ),
    "probe": CommandFlags(
        description="Measure the time of a model's parts on these hosts and the speed of the links between them; kept in "
        "~/.cache/labinfer.",
        summary="measure hosts and links, for plans",
        options=(ProbeOptions, *MEASURING),
        left_out=("layout",),
    ),
    "simulate": CommandFlags(
        description="What bench serve would measure: the same engine on a virtual clock, without a model and without other ranks; all times "
        "are what the run would take. Speculation is left out: drafts depend on tokens, which a simulation does not compute.",
        summary="what bench serve would measure, computed",
        options=(SimulateOptions, BenchOptions, LoadOptions, ServeOptions, *SECTIONS),
        left_out=tuple(f.name for section in SECTIONS for f in dataclasses.fields(section) if f.name not in SIMULATED),
    ),
    "cache": CommandFlags(
        description="Show the packed weights that are kept for the next start of a model.",
        summary="show the packed weights that are kept on disk",
        options=(WeightCacheOptions,),
    ),
    "bench latency": CommandFlags(
        description="Time of a fixed batch, from its first request to its last token.",
        options=(BenchOptions, LatencyOptions, *SECTIONS),
    ),
    "bench throughput": CommandFlags(
        description="Requests and tokens a second, with all requests there from the beginning.",
        options=(BenchOptions, LoadOptions, *SECTIONS),
    ),
    "bench serve": CommandFlags(
        description="Latencies of requests that arrive one by one, whether or not the engine keeps up.",
        options=(BenchOptions, LoadOptions, ServeOptions, *SECTIONS),
    ),
    "bench comm": CommandFlags(
        description="Latency and bandwidth of every collective and send in use.",
        options=(ParallelOptions, RuntimeOptions),
        left_out=("layout",),
    ),
    "bench accuracy": CommandFlags(
        description="What dtypes, quantised weights and KV cache types lose against the float32 model: of all of them, or of "
        "the one that --dtype, --quantization and --kv-cache-dtype name.",
        options=(AccuracyOptions, *MEASURING),
    ),
    "bench functions": CommandFlags(
        description="Time every implementation of every function at a model's sizes, beside the limits of this machine.",
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
            summary=details.get("help") or "a command of a plugin",
            options=tuple(details.get("options", ())),
        )
        for name, details in own.items()
    }
