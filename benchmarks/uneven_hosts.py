"""Predicted and measured round times on three uneven hosts: network namespaces with CPU quotas and shaped links (Linux, root).

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/uneven_hosts.py --model DIR --delay 0
    python benchmarks/uneven_hosts.py --model DIR --delay 5

Hosts have 1, 0.5 and 0.25 CPUs by cgroup v1, with a period of 5 ms. Without a delay they are joined by cables of --mbit; with one, by
a relay between TUN devices that hands every packet on after so many milliseconds: kernels without netem have no other way. One launch
of mpirun probes hosts and links, then decodes with every layout. A round is the time from a sequence's token to its next one, the mean
of all sequences and rounds but the first ones. It is predicted twice: by the planner's formula, and by a simulation of the same run.
Where the formula with the seconds that the stages were busy comes near a round and the formula with probed ones does not, the probe is
wrong; where neither does, the formula.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from namespace_cables import address
from namespace_hosts import TRANSPORTS, hosts

QUOTAS = (1.0, 0.5, 0.25)
LAUNCH = str(Path(__file__).parent.parent / "launch.py")
SPLITS = [
    ((8, 8, 8), (0, 1, 2)),
    ((14, 7, 3), (0, 1, 2)),
    ((18, 5, 1), (0, 1, 2)),
    ((12, 4, 8), (0, 2, 1)),
    ((4, 6, 14), (2, 1, 0)),
    ((16, 8), (0, 1)),
    ((12, 12), (0, 1)),
    ((20, 4), (0, 2)),
    ((8, 16), (1, 0)),
    ((4, 20), (2, 0)),
]
"""Layers of each stage, and its host; host 0 schedules."""
LOADS = ((24, 1), (24, 0))
"""Sequences at once, and micro-batches that they are in: 0 for as many as stages. Steps take many periods of a quota."""
PROMPT, SKIPPED, LENGTH = 8, 4, 16
"""Tokens of each prompt, tokens of each answer before what is measured, and of the whole answer."""
CONTEXT = 512
"""Tokens of --max-model-len. It and --no-autotune are those of the launch, which finds by them what was probed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds of each hop")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of each link")
    parser.add_argument("--splits", default=f"0:{len(SPLITS)}", metavar="A:B", help="only these of the layouts")
    parser.add_argument("--json", default="", help="also write all figures to this file")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        measure(args)
        return
    flags = [f"--{name}={getattr(args, name)}" for name in ("delay", "mbit", "splits")]
    figures = run_on_hosts(__file__, args.model, flags, delays=[args.delay / 2e3] * len(QUOTAS), mbit=args.mbit)
    report(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


def run_on_hosts(
    script: str,
    model: str,
    flags: list[str],
    *,
    delays: list[float],
    mbit: float,
    quotas: tuple[float, ...] = QUOTAS,
    memories: tuple[float, ...] = (),
) -> dict:
    """Probe hosts one by one, then run a script on all of them; returns what it writes as JSON to the file of its --rank-of.

    Args:
        delays: seconds between each host and the middle of the network.
        mbit: rate of each link.
        memories: GiB of each host; empty for all of this machine's.
    """
    if os.geteuid() != 0:
        sys.exit("namespaces and quotas need root")
    with (
        tempfile.TemporaryDirectory() as directory,
        hosts(Path(directory), quotas, delays=delays, mbit=mbit, memories=memories) as launcher,
    ):
        results = Path(directory) / "results.json"
        rsh, mpirun = launcher[0], launcher[2:]
        for number in range(len(quotas)):  # alone, as they share a memory; the launch finds what was kept
            probe = [sys.executable, LAUNCH, "probe", "--model", os.path.abspath(model)]
            probe += [f"--max-model-len={CONTEXT}", "--no-autotune"]
            subprocess.run([rsh, address(number), *probe], check=True)
        command = [rsh, address(0), *mpirun, sys.executable, script, f"--model={model}", *flags, f"--rank-of={results}"]
        subprocess.run(command, check=True, env=os.environ | TRANSPORTS)
        return json.loads(results.read_text())


# On every rank.


class Joined:
    """The group of a launch on the hosts, and models that it loads one after another.

    Args:
        fields: of ``EngineOptions``, beside or in place of those that all these benchmarks have.
    """

    def __init__(self, model: str, **fields):
        from labinfer.base.config import EngineOptions
        from labinfer.comm.group.failure import end_group_on_uncaught
        from labinfer.comm.group.rank_group import join_group
        from labinfer.comm.spmd.environment import detect
        from labinfer.launch.measure.probe import probe_cluster
        from labinfer.observe.logs import set_up_logging

        common = {"max_model_len": CONTEXT, "num_kv_blocks": 1024, "weight_cache_size": 0.0, "autotune": "off"}
        self.fields = {"model": model} | common | {"enable_prefix_caching": False} | fields
        options = EngineOptions.from_flat(self.fields)
        self.group = join_group(detect(), options)
        end_group_on_uncaught(self.group)
        set_up_logging(self.group.rank, "info")
        self.cluster = probe_cluster(self.group, options)
        """Measurements of the hosts and their links, on every rank."""

    def load(self, layers: tuple[int, ...], ranks: tuple[int, ...], in_flight: int):
        """An ``LLM`` with these layers on each host; collective."""
        from labinfer.api.llm import LLM
        from labinfer.base.config import EngineOptions

        return LLM.from_options(self.group, EngineOptions.from_flat(self.split(layers, ranks, in_flight)))

    def split(self, layers: tuple[int, ...], ranks: tuple[int, ...], in_flight: int) -> dict:
        """Fields of its options."""
        own = {"layers": layers, "pipeline_parallel_size": len(layers), "ranks": ranks, "max_inflight": in_flight}
        return self.fields | own

    def unload(self, llm) -> None:
        """Unload ``llm``, so that the next layout fits in memory; collective."""
        llm.unload()
        self.group.end_splits()


def measure(args: argparse.Namespace) -> None:
    """Probe, then run every case; rank 0 writes what came of it."""
    from labinfer.comm.links import measure_neighbours

    begin = time.perf_counter()
    joined = Joined(args.model)
    cluster, group = joined.cluster, joined.group
    neighbours = measure_neighbours(group.comm, range(group.size))
    if group.rank == 0:
        seconds = time.perf_counter() - begin
        print(f"ready after {seconds:.1f} s", *map(str, cluster.links), neighbours, sep="\n", flush=True)
    figures = []
    begin, end = map(int, args.splits.split(":"))
    for layers, ranks in SPLITS[begin:end]:
        for sequences, in_flight in LOADS:
            in_flight = in_flight or len(layers)
            llm = joined.load(layers, ranks, in_flight)
            figure = {"layers": layers, "hosts": ranks, "sequences": sequences, "in_flight": in_flight}
            figure |= measure_round(llm, sequences)
            if group.rank == 0:
                figure |= predict_round(cluster, layers, ranks, sequences, in_flight=in_flight)
                figure["simulated"] = simulate_round(cluster, joined.split(layers, ranks, in_flight), sequences)
                figures.append(figure)
                print(figure, flush=True)
            joined.unload(llm)
    if group.rank == 0:
        import msgspec

        Path(args.rank_of).write_text(
            json.dumps({"cases": figures, "cluster": json.loads(msgspec.json.encode(cluster))})
        )
    group.close()


def make_prompts(sequences: int) -> list[dict]:
    """Prompts of token ids."""
    return [{"prompt_token_ids": [(17 + 7 * i + 3 * j) % 1000 for j in range(PROMPT)]} for i in range(sequences)]


class TokenTimes:
    """Times at which each sequence got its tokens.

    Args:
        clock: seconds.
    """

    def __init__(self, clock):
        self._clock, self._times = clock, defaultdict(list)

    def note(self, delta) -> None:
        self._times[delta.key] += [self._clock()] * len(delta.token_ids)

    @property
    def round(self) -> float:
        """Mean seconds from a token to the next one."""
        spans = [(times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED) for times in self._times.values()]
        return statistics.mean(spans)


def measure_round(llm, sequences: int) -> dict:
    """Seconds from a token to the next one, and those in which each stage is busy in a step, on rank 0."""
    from labinfer import SamplingParams
    from labinfer.observe.gantt import BUSY_SLICES
    from labinfer.observe.recorder import CAPACITY
    from labinfer.observe.trace import make_tracks

    prompts, times = make_prompts(sequences), TokenTimes(time.perf_counter)
    llm.generate(prompts, SamplingParams(max_tokens=SKIPPED, ignore_eos=True))
    llm.record_steps(CAPACITY)
    llm.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True), times.note)
    if not llm.is_rank0:
        return {}
    busy = []
    for track in sorted(make_tracks(llm.report.workers), key=lambda track: track.stage):
        steps: dict[int, int] = defaultdict(int)
        for part in track.slices:
            if part.name in BUSY_SLICES and 0 < part.num_tokens == part.num_decodes:
                steps[part.step_id] += part.end - part.begin
        busy.append(statistics.mean(list(steps.values())[SKIPPED:]) / 1e9)
    return {"measured": times.round, "busy": busy}


def predict_round(
    cluster, layers: tuple[int, ...], ranks: tuple[int, ...], sequences: int, *, in_flight: int
) -> dict[str, float]:
    """The same from the costs: the stages one after another, or the slowest of them for each micro-batch."""
    from labinfer.planner.objective import Criterion, Stage, stage_seconds
    from labinfer.planner.step_shape import StepShape

    rows = sequences / in_flight
    step = StepShape(rows, rows * (PROMPT + (SKIPPED + LENGTH) / 2), (), rows)
    machines = [cluster.machines[rank] for rank in ranks]
    ends = list(itertools.accumulate(layers))
    stages = [
        Stage(machine=machine.name, costs=machine.costs[0], begin=end - count, end=end)
        for machine, count, end in zip(machines, layers, ends, strict=True)
    ]
    path, bottleneck = ((1.0, step),), ((float(in_flight), step),)
    criterion = Criterion(path=path, bottleneck=bottleneck, adds=False, num_seqs=sequences, num_batches=in_flight)
    hops, transfer = criterion.route_seconds(stages, cluster)
    first, last, scheduler = machines[0].name, machines[-1].name, cluster.machines[0].name
    hops += cluster.link(last, scheduler).latency + cluster.link(scheduler, first).latency
    hops -= cluster.link(last, first).latency if len(stages) > 1 else 0.0
    seconds = [stage_seconds(path, stages, number) for number in range(len(stages))]
    predicted = criterion.value(sum(seconds) + hops, max(in_flight * max(seconds), transfer))
    return {"predicted": predicted, "stages": seconds, "hops": hops}


def simulate_round(cluster, flat: dict, sequences: int) -> float:
    """The same from a simulation of the run."""
    from labinfer import SamplingParams
    from labinfer.base.config import EngineOptions
    from labinfer.planner.simulator.simulation import cluster_simulation

    options = EngineOptions.from_flat({key: value for key, value in flat.items() if key != "model"})
    model = cluster_simulation(cluster, options).make_model(options.cache, options.scheduler)
    sampling, times = SamplingParams(max_tokens=LENGTH, ignore_eos=True), TokenTimes(model.clock)
    requests = [model.make_request(key, prompt, sampling) for key, prompt in enumerate(make_prompts(sequences))]
    for _ in model.run(requests, on_delta=times.note):
        pass
    return times.round


def report(figures: dict) -> None:
    from labinfer.observe.table import format_table

    rows, errors, simulated_errors = [], [], []
    for entry in figures["cases"]:
        layers, ranks = (",".join(map(str, entry[name])) for name in ("layers", "hosts"))
        error = entry["predicted"] / entry["measured"] - 1
        simulated = entry["simulated"] / entry["measured"] - 1
        errors.append(abs(error))
        simulated_errors.append(abs(simulated))
        stages = " ".join(f"{1e3 * seconds:.0f}" for seconds in entry["stages"])
        whole = max(sum(entry["busy"]) + entry["hops"], entry["in_flight"] * max(entry["busy"])) / entry["measured"] - 1
        busy = " ".join(f"{1e3 * seconds:.0f}" for seconds in entry["busy"])
        texts = (layers, ranks, entry["sequences"], entry["in_flight"])
        rows.append(
            (
                *texts,
                f"{1e3 * entry['measured']:.1f}",
                f"{1e3 * entry['predicted']:.1f}",
                f"{100 * error:+.1f}",
                f"{1e3 * entry['simulated']:.1f}",
                f"{100 * simulated:+.1f}",
                stages,
                busy,
                f"{100 * whole:+.1f}",
            )
        )
    print(
        format_table(
            (
                "layers",
                "hosts",
                "sequences",
                "in flight",
                "measured ms",
                "predicted ms",
                "error %",
                "simulated ms",
                "error %",
                "stages ms",
                "busy ms",
                "error from busy %",
            ),
            rows,
        )
    )
    for name, each in (("predicted", errors), ("simulated", simulated_errors)):
        ranking = rank_correlation([(case[name], case["measured"]) for case in figures["cases"]])
        print(
            f"{name}: median error {100 * statistics.median(each):.1f} %, worst {100 * max(each):.1f} %, ranking: tau {ranking:.3f}"
        )


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau of two rankings of the same things: 1 where every two of them are in the same order in both, -1 in none."""
    orders = [1 if (a[0] < b[0]) == (a[1] < b[1]) else -1 for a, b in itertools.combinations(pairs, 2)]
    return statistics.mean(orders)


if __name__ == "__main__":
    main()
