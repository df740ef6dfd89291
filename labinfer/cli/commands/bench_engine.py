"""``launch.py bench latency``, ``throughput`` and ``serve``: rank 0 measures, and the other ranks take part in the steps."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

from labinfer.api.llm import LLM
from labinfer.base.errors import ExitStatus, Interrupted
from labinfer.base.option_fields import join
from labinfer.cli.bench.benchmark import Benchmark, BenchResult
from labinfer.cli.bench.latency import LatencyBenchmark
from labinfer.cli.bench.options import BenchOptions, LatencyOptions
from labinfer.cli.bench.serve import ServeBenchmark
from labinfer.cli.bench.throughput import ThroughputBenchmark
from labinfer.cli.commands.gantt import draw_gantt
from labinfer.cli.commands.loading import announce, load
from labinfer.cli.commands.plot_file import check_plot
from labinfer.cli.commands.session import Session
from labinfer.observe.gantt import make_gantt
from labinfer.observe.output_file import STANDARD, OutputFile, tell_written
from labinfer.observe.progress_line import Ticker
from labinfer.observe.recorder import CAPACITY
from labinfer.observe.trace import make_tracks

KINDS = {"latency": LatencyBenchmark, "throughput": ThroughputBenchmark, "serve": ServeBenchmark}
logger = logging.getLogger(__name__)


def run(session: Session, kind: str, options: list) -> int:
    """Run a benchmark on every rank; returns the exit status.

    Args:
        kind: one of ``KINDS``.
        options: options of the benchmark, ``BenchOptions`` first.

    Raises:
        CollectiveError: the benchmark cannot run, or the results cannot be written; raised on every rank.
    """
    group = session.join()
    file = None
    own: BenchOptions = options[0]
    with group.raise_on_all_ranks():
        benchmark = KINDS[kind](*options)
        if group.rank == 0 and own.output_json:
            file = OutputFile(own.output_json, "--output-json")
        if group.rank == 0 and own.plot:
            check_plot(own.plot, {"--output-json": own.output_json, "--trace": session.options.observe.trace})
    llm = load(session)
    if own.plot:
        llm.record_steps(CAPACITY)
    with group.raise_on_all_ranks():
        if group.rank == 0:
            announce({session.options.model.model: llm})
            benchmark.prepare(llm)
    session.signals.running = True
    with group.raise_on_all_ranks():  # rank 0 may fail to write; then the other ranks must not wait for it
        if group.rank == 0:
            figures = _measure(llm, session, benchmark, file)
            if figures and own.plot:
                gantt = make_gantt(make_tracks(llm.report.workers), figures.steps)
                draw_gantt(own.plot, gantt, f"bench {kind} of {_describe(llm, options)}")
            if figures:
                tell_written(own.output_json, own.plot, session.options.observe.trace)
        else:
            llm.follow()
    llm.close()
    return 128 + session.signals.signum if session.signals.signum else ExitStatus.OK


def _measure(llm: LLM, session: Session, benchmark: Benchmark, file: OutputFile | None) -> BenchResult | None:
    try:
        with contextlib.closing(Ticker(lambda: f"measuring, finished requests: {llm.report.num_finished}")):
            figures = benchmark.run(llm, session.signals.check)
    except Interrupted:
        logger.info("interrupted; no results")
        return None
    if file is not None:  # the file before the table, as printing fails if the reader is gone
        file.begin()
        file.write(json.dumps(_record(llm, session, figures), indent=2) + "\n")
    OutputFile(STANDARD).write(f"{figures.text}\n\nenergy: {llm.report.energy().describe()}\n")
    return figures


def _record(llm: LLM, session: Session, figures: BenchResult) -> dict:
    return {
        "model": session.options.model.model,
        "num_ranks": llm.group.size,
        **figures.values,
        "energy": llm.report.energy().as_dict(),
    }


def _describe(llm: LLM, own: list) -> str:
    options, topology = llm.options, llm.layout.topology
    tp_sizes = topology.tp_sizes if len(set(topology.tp_sizes)) > 1 else topology.tp_sizes[:1]
    model = Path(options.model.model).name or options.model.model
    sequences = f"at most {options.scheduler.max_num_seqs} running sequences"
    if isinstance(own[1], LatencyOptions):
        sequences = f"batches of {own[1].batch_size} request{'s' * (own[1].batch_size > 1)}"
    return (
        f"{model}, tp {join(tp_sizes)} × pp {topology.num_stages}, {options.scheduler.pipeline_schedule}, {sequences}"
    )
