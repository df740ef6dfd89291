"""``launch.py bench latency``, ``throughput`` and ``serve``: rank 0 measures, the others follow."""

from __future__ import annotations

import json
import logging

from labinfer.bench.benchmark import Benchmark, Figures
from labinfer.bench.latency import LatencyBenchmark
from labinfer.bench.serve import ServeBenchmark
from labinfer.bench.throughput import ThroughputBenchmark
from labinfer.commands.loading import announce, load
from labinfer.commands.session import Session
from labinfer.errors import ExitStatus, Interrupted
from labinfer.llm import LLM
from labinfer.observe.output_file import STANDARD, OutputFile

KINDS = {"latency": LatencyBenchmark, "throughput": ThroughputBenchmark, "serve": ServeBenchmark}
logger = logging.getLogger(__name__)


def run(session: Session, kind: str, options: list) -> int:
    """Run a benchmark on every rank; returns the exit status.

    Args:
        kind: one of ``KINDS``.
        options: its own, ``BenchOptions`` first.

    Raises:
        AgreedError: nothing could be run, or the figures could not be written; on every rank.
    """
    group = session.join()
    file = None
    output_json = options[0].output_json
    with group.together():
        benchmark = KINDS[kind](*options)
        if group.rank == 0 and output_json:
            file = OutputFile(output_json, "--output-json")
    llm = load(session)
    with group.together():
        if group.rank == 0:
            announce({session.options.model.model: llm})
            benchmark.prepare(llm)
    session.signals.running = True
    with group.together():  # rank 0 may fail to write; the others must not wait for it then
        if group.rank == 0:
            _measure(llm, session, benchmark, file)
        else:
            llm.follow()
    llm.close()
    return 128 + session.signals.signum if session.signals.signum else ExitStatus.OK


def _measure(llm: LLM, session: Session, benchmark: Benchmark, file: OutputFile | None) -> None:
    try:
        figures = benchmark.run(llm, session.signals.check)
    except Interrupted:
        logger.info("interrupted; there are no figures")
        return
    OutputFile(STANDARD).write(figures.text + "\n")
    if file is not None:
        file.begin()
        file.write(json.dumps(_record(llm, session, figures), indent=2) + "\n")


def _record(llm: LLM, session: Session, figures: Figures) -> dict:
    return {"model": session.options.model.model, "num_ranks": llm.group.size, **figures.values}
