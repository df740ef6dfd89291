"""``launch.py simulate``: ``bench serve`` with the real scheduler on a virtual clock, for layouts on machines that need not be
running."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from labinfer.base.config import EngineOptions
from labinfer.base.errors import ExitStatus, UserError
from labinfer.base.option_fields import join
from labinfer.cli.bench.options import BenchOptions, LoadOptions, ServeOptions
from labinfer.cli.bench.serve import ServeBenchmark
from labinfer.cli.commands.gantt import draw_gantt
from labinfer.cli.commands.plot_file import check_plot
from labinfer.observe.gantt import make_gantt
from labinfer.observe.logs import set_up_logging
from labinfer.observe.output_file import STANDARD, OutputFile, tell_written
from labinfer.observe.recorder import CAPACITY
from labinfer.observe.table import format_table
from labinfer.observe.trace import make_tracks
from labinfer.planner.cluster import Cluster
from labinfer.planner.simulator.figures import replay_figures, stage_figures
from labinfer.planner.simulator.options import SimulateOptions
from labinfer.planner.simulator.rates import highest_rate
from labinfer.planner.simulator.simulation import Simulation, cluster_simulation, replay_simulation

TITLE = "simulated on a virtual clock; all times are predictions"


def run(
    options: EngineOptions, own: SimulateOptions, bench: BenchOptions, load: LoadOptions, serve: ServeOptions
) -> int:
    """Simulate the benchmark. Prints the output of ``bench serve``, then a table of the stages. Returns the exit
    status.

    Raises:
        UserError: the options are inconsistent, or a file cannot be read or written.
    """
    set_up_logging(0, options.runtime.log_level)
    if bool(own.cluster) == bool(own.replay):
        raise UserError("simulate needs one source of step times: give either --cluster FILES or --replay TRACE")
    if own.link and not own.cluster:
        raise UserError("--link needs --cluster; leave it out")
    if own.find_rate and not serve.goodput:
        raise UserError("--find-rate needs latency targets; add --goodput, as in --goodput ttft:500,tpot:50")
    if bench.plot:
        check_plot(bench.plot, {"--output-json": bench.output_json, "--trace": options.observe.trace})
    if own.replay:
        simulation = replay_simulation(own.replay)
    else:
        cluster = Cluster.read(own.cluster, own.link)
        options = cluster.with_block_size(options)
        simulation = cluster_simulation(cluster, options)
    if options.scheduler.preemption_mode == "swap" and not simulation.spec.num_host_blocks:
        raise UserError(
            "--preemption-mode swap: --cluster has no swap times; use recompute, or --replay of a run that swapped"
        )
    benchmark = ServeBenchmark(bench, load, serve)
    sources = {"--replay": own.replay} | {f"--cluster {path}": path for path in own.cluster}
    file = OutputFile(bench.output_json, "--output-json", sources) if bench.output_json else None
    trace = OutputFile(options.observe.trace, "--trace", sources) if options.observe.trace else None
    texts, values = [TITLE], {"simulated": True, "num_ranks": simulation.topology.num_places}
    if own.find_rate:
        serve, text, rate_values = _find_rate(simulation, options, bench, load, serve)
        benchmark = ServeBenchmark(bench, load, serve)
        texts.append(text)
        values |= rate_values
    records = bool(bench.plot or trace or simulation.recorded)
    model = simulation.make_model(options.cache, options.scheduler, trace=trace, num_slices=CAPACITY if records else 0)
    benchmark.prepare(model)
    result = benchmark.run(model, lambda: None)
    texts.append(result.text)
    values |= result.values
    compares = bool(simulation.recorded) and not own.find_rate
    for make_figures in [stage_figures, *[replay_figures] * compares]:
        text, more = make_figures(simulation, model.report)
        texts.append(text)
        values |= more
    OutputFile(STANDARD).write("\n\n".join(texts) + "\n")
    if file is not None:
        file.begin()
        file.write(json.dumps(values, indent=2) + "\n")
    if bench.plot:
        source = ", ".join(Path(path).name for path in [own.replay] * bool(own.replay) or own.cluster)
        title = f"simulated: {source}, {options.scheduler.pipeline_schedule}"
        draw_gantt(bench.plot, make_gantt(make_tracks(model.report.workers), result.steps), title)
    tell_written(bench.output_json, bench.plot, options.observe.trace)
    return ExitStatus.OK


def _find_rate(
    simulation: Simulation, options: EngineOptions, bench: BenchOptions, load: LoadOptions, serve: ServeOptions
) -> tuple[ServeOptions, str, dict[str, Any]]:
    """Find the highest request rate that meets all latency limits. Returns options with this rate, a table of all rates that were
    tried, and values for the JSON file.

    Raises:
        UserError: no rate meets the limits.
    """
    goals = serve.goals
    tried: list[tuple] = []

    def is_kept(rate: float) -> bool:
        model = simulation.make_model(options.cache, options.scheduler)
        benchmark = ServeBenchmark(bench, load, replace(serve, request_rate=rate))
        benchmark.prepare(model)
        values = benchmark.run(model, lambda: None).values
        figures = [values.get(f"p99_{name}_ms", 0.0) for name in goals]
        kept = all(figure <= 1000 * goal for figure, goal in zip(figures, goals.values(), strict=True))
        tried.append((round(rate, 4), *figures, "yes" if kept else "no"))
        return kept

    rate = highest_rate(is_kept)
    if rate == 0:
        figures = ", ".join(
            f"the 99th percentile of {name.upper()} is {figure:.1f} ms"
            for name, figure in zip(goals, tried[-1][1:], strict=False)
        )
        raise UserError(
            f"--goodput {join(serve.goodput)}: no rate meets it; at {tried[-1][0]:g} requests per second {figures}"
        )
    header = ("requests/s", *(f"p99 {name.upper()} (ms)" for name in goals), "kept")
    highest = f"{rate:.3g} requests per second" if math.isfinite(rate) else "any rate"
    text = f"{format_table(header, sorted(tried))}\n\nthe highest rate that meets {join(serve.goodput)}: {highest}"
    return replace(serve, request_rate=rate), text, {"highest_rate": rate if math.isfinite(rate) else "inf"}
