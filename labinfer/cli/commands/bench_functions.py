"""``launch.py bench functions``: times of every implementation of every function, compared with the machine's roofline limits.

Sizes are those of the rank's shard of a model, whose weights are not needed. All ranks measure at one time, as all compute in a
run; rank 0 prints its own results. If it has the whole model, it also prints the limits of the workloads W1, W2 and W3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

import torch

from labinfer.base.errors import ExitStatus
from labinfer.cli.bench.options import FunctionBenchOptions
from labinfer.cli.bench.workload_limits import PackedBytes, WorkloadLimits
from labinfer.cli.bench.workloads import USUAL_WORKLOADS, draw_workloads
from labinfer.cli.commands.plot_file import check_plot
from labinfer.cli.commands.roofline import Figure, draw_roofline
from labinfer.cli.commands.session import Session
from labinfer.comm.spmd.devices import use_device
from labinfer.functions.autotune import TIMED_ROWS, Times, choose, is_tuned, time_candidates
from labinfer.functions.calls import LinearCall
from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.rank_calls import RankCalls
from labinfer.functions.roofline_limits import RooflineLimits
from labinfer.launch.find_model import find_model
from labinfer.launch.layout.layout import make_layout
from labinfer.launch.providers import make_registry, parse_overrides
from labinfer.launch.tune import make_rank_calls, prepare_providers, try_functions
from labinfer.observe.output_file import STANDARD, OutputFile, tell_written
from labinfer.observe.progress_line import Ticker
from labinfer.observe.table import format_table

SECONDS = 0.2
"""Seconds for timing all implementations of a function at one number of rows."""
HEADER = ("rows", "implementation", "us", "GB/s", "GFLOP/s", "% memory", "% compute", "auto")
"""Columns of the table of a function; ``% memory`` and ``% compute`` are relative to the ``RooflineLimits``."""


def run(session: Session, own: FunctionBenchOptions) -> int:
    """Measure, and print one row for each function, number of rows (tokens) and implementation on rank 0."""
    group = session.join()
    file = None
    with group.raise_on_all_ranks():
        if group.rank == 0 and own.output_json:
            file = OutputFile(own.output_json, "--output-json")
        if group.rank == 0 and own.plot:
            check_plot(own.plot, {"--output-json": own.output_json})
    options = session.options
    _, config = find_model(group, options)
    with group.raise_on_all_ranks():
        group.refuse_spares(options.parallel.ranks)
        layout = make_layout(options, config, group.everyone)
        device = use_device(layout.devices[group.rank])
    place = layout.topology.place(group.rank)
    dtype = layout.dtype(place)
    providers = prepare_providers(group, device, reproducible=options.model.reproducible)
    overrides = parse_overrides(options.model.functions)
    with group.raise_on_all_ranks():
        registry = make_registry(providers, layout.quantization_group_size, layout.weights)
        registry.check(device, dtype, overrides, layout.rounding(place))
        try_functions(layout, place, registry, overrides, providers, anew=options.model.autotune == "again")
        calls = make_rank_calls(layout, place, registry, overrides)
    group.comm.barrier()
    measured = (provider.roofline_limits() for provider in providers)
    ticker = contextlib.closing(Ticker(lambda: "measuring")) if group.rank == 0 else contextlib.nullcontext()
    with ticker, torch.inference_mode():
        limits = next(filter(None, measured), RooflineLimits(torch.get_num_threads(), 0, 0, 0, 0))
        times = time_candidates(calls, calls.candidates, SECONDS, dropout_ratio=float("inf"))
        figures = make_figures(calls, times, limits, is_tuned(dtype) and options.model.autotune != "off")
        workloads = {}
        if layout.topology.num_places == 1:
            model, kv_dtype = layout.meta(place).model, layout.kv_dtype(place)
            workloads = workload_limits(WorkloadLimits(model, count_packed_bytes(calls, figures), kv_dtype, limits))
    with group.raise_on_all_ranks():
        if group.rank == 0:
            described = "\n".join([describe_limits(limits), *describe_workloads(workloads)])
            OutputFile(STANDARD).write(f"{described}\n\n{figures_table(figures)}\n")
        if file is not None:
            report = {
                "roofline_limits": dataclasses.asdict(limits),
                "workload_limits": workloads,
                "figures": list(map(dataclasses.asdict, figures)),
            }
            file.begin()
            file.write(json.dumps(report, indent=1) + "\n")
        if group.rank == 0 and own.plot:
            draw_roofline(own.plot, figures, limits)
        if group.rank == 0:
            tell_written(own.output_json, own.plot)
    group.close()
    return ExitStatus.OK


def make_figures(calls: RankCalls, times: Times, limits: RooflineLimits, is_tuned: bool) -> list[Figure]:
    """Convert measured times to figures: bandwidth and operations per second, relative to the roofline limits."""
    contested = calls.contested()
    autotuned = {
        target: [timing for timing in times[target] if timing.name in candidates]
        for target, candidates in contested.items()
    }
    choice = choose([autotuned]) if is_tuned else {}
    figures = []
    for target, timings in times.items():
        quantization = calls.quantization[target]
        peak = limits.arithmetic(quantization)
        for index, rows in enumerate(TIMED_ROWS):
            auto = choice[target][index] if target in choice else timings[-1].name
            for timing in timings:
                work = calls.work(target, calls.candidates[target][timing.name], rows)
                seconds = timing.seconds[index]
                figures.append(
                    Figure(
                        function=target,
                        weights=quantization,
                        rows=rows,
                        implementation=timing.name,
                        seconds=seconds,
                        num_bytes=work.num_bytes,
                        operations=work.operations,
                        memory=work.num_bytes / seconds / limits.memory if limits.memory else 0.0,
                        arithmetic=work.operations / seconds / peak if peak else 0.0,
                        is_chosen=timing.name == auto,
                    )
                )
        calls.forget_weights()
    return figures


def describe_limits(limits: RooflineLimits) -> str:
    """Describe the measured roofline limits in one line."""
    if not limits.memory:
        return "no roofline limits: measuring them needs the compiled CPU kernels, which are not available"
    rates = limits.arithmetic_rates().items()
    arithmetic = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates)
    threads = f"{limits.threads} thread{'s' * (limits.threads != 1)}"
    return f"roofline limits ({threads}): memory {limits.memory / 1e9:.1f} GB/s, {arithmetic}"


def count_packed_bytes(calls: RankCalls, figures: list[Figure]) -> PackedBytes:
    """Bytes of the rank's weights, packed as for the implementations that a run would use at one row."""
    chosen = {figure.function: figure.implementation for figure in figures if figure.is_chosen and figure.rows == 1}
    num_bytes = {LinearCall: 0.0, ExpertsCall: 0.0}
    for target, counts in calls.counts.items():
        if (kind := type(next(iter(counts)))) in num_bytes:
            num_bytes[kind] += calls.packed_bytes(target, calls.candidates[target][chosen[target]])
            calls.forget_weights()
    return PackedBytes(num_bytes[LinearCall], num_bytes[ExpertsCall])


def workload_limits(limits: WorkloadLimits) -> dict[str, float]:
    """Limits of W1, W2 and W3 in tokens/s, by name; empty if they are not known."""
    if not limits.is_known:
        return {}
    return {name: limits.tokens_per_second(work) for name, work in draw_workloads().items() if name in USUAL_WORKLOADS}


def describe_workloads(workloads: dict[str, float]) -> list[str]:
    """Lines with the limits of the workloads at the model's sizes."""
    titles = {
        "W1": "one stream, decode",
        "W2": "a batch of 32 requests, output",
        "W3": "a prompt of 2048 tokens, prefill",
    }
    return [f"limit of {name} ({titles[name]}): {limit:.1f} tokens/s" for name, limit in workloads.items()]


def figures_table(figures: list[Figure]) -> str:
    """Text with a table for each function and kind of weights; a star marks the implementation that a run would use."""
    rows: dict[str, list[tuple]] = {}
    for figure in figures:
        title = figure.function + f", {figure.weights} weights" * (figure.weights != "none")
        row = (
            figure.rows,
            figure.implementation,
            round(figure.seconds * 1e6, 1),
            round(figure.num_bytes / figure.seconds / 1e9, 1),
            round(figure.operations / figure.seconds / 1e9),
            round(100 * figure.memory),
            round(100 * figure.arithmetic),
            "*" if figure.is_chosen else "",
        )
        rows.setdefault(title, []).append(row)
    return "\n\n".join(f"{title}\n{format_table(HEADER, group)}" for title, group in rows.items())
