"""The layout that the planner chooses on uneven hosts beside all others that could be better: what each of them gives, measured.

    python tools/random_checkpoint.py --shape small --layers 24 --dtype bfloat16 DIR
    python benchmarks/plan_choice.py --model DIR
    python benchmarks/plan_choice.py --model DIR --objective latency
    python benchmarks/plan_choice.py --model DIR --objective memory
    python benchmarks/plan_choice.py --model DIR --slow-host

Hosts are those of ``uneven_hosts.py``. Measured are the chosen layout, the even split, the first host alone, and every split in steps
of two layers that comes to at least --share of the chosen one's rate by the costs; what comes to less cannot be the best unless
costs are wrong by more than that. ``--slow-host`` adds a fourth host with 0.05 CPUs behind 20 ms, and measures what the best layout with it gives.
For memory the hosts have limits (cgroup v1), and what counts is the number of tokens for which the KV cache of a start has room, among the
splits that keep nine tenths of the best predicted throughput.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from uneven_hosts import CONTEXT, QUOTAS, Joined, run_on_hosts

SLOW_HOST, SLOW_DELAY = 0.05, 0.020
PROMPT, OUTPUTS, REQUESTS, SEQUENCES = 32, range(16, 49, 2), 51, 24
STEP = 2
"""Step between two tried numbers of layers."""
MEMORIES = (1.5, 1.0, 0.75)
"""GiB of each host, where memory is what counts, with more sequences than there is room for."""
ROOMY = {"num_kv_blocks": 0, "max_num_seqs": 1024, "max_model_len": 2048}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--objective", choices=("throughput", "latency", "memory"), default="throughput")
    parser.add_argument(
        "--share", type=float, default=0.7, help="of the best predicted rate, for a split to be measured"
    )
    parser.add_argument("--slow-host", action="store_true", help="add a host that should be left out")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each layout, of which the fastest counts")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of each link")
    parser.add_argument("--json", default="", help="also write all figures to this file")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        measure(args)
        return
    flags = [f"--{name}={getattr(args, name)}" for name in ("objective", "share", "repeats", "mbit")]
    flags += ["--slow-host"] * args.slow_host
    delays = [0.0] * len(QUOTAS) + [SLOW_DELAY] * args.slow_host
    quotas = (*QUOTAS, SLOW_HOST) if args.slow_host else QUOTAS
    memories = MEMORIES if args.objective == "memory" else ()
    figures = run_on_hosts(__file__, args.model, flags, delays=delays, mbit=args.mbit, quotas=quotas, memories=memories)
    report(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


# On every rank.


def measure(args: argparse.Namespace) -> None:
    """Probe, plan, and run every layout; rank 0 writes what came of it."""
    own = ROOMY if args.objective == "memory" else {"max_num_seqs": SEQUENCES}
    joined = Joined(args.model, **own)
    group = joined.group
    cases = list(choose_cases(joined.cluster, args)) if group.rank == 0 else []
    cases = json.loads(group.comm.all_gather_bytes(json.dumps(cases).encode())[0])
    for case in cases:
        llm = joined.load(tuple(case["layers"]), tuple(case["hosts"]), case["in_flight"])
        if args.objective == "memory" and llm.is_rank0:
            case["measured"] = llm.spec.num_blocks * llm.options.cache.block_size
        elif args.objective != "memory":
            case["measured"] = min(run_requests(llm, args.objective) for _ in range(args.repeats))
        if group.rank == 0:
            print(case, flush=True)
        joined.unload(llm)
    if group.rank == 0:
        Path(args.rank_of).write_text(json.dumps({"objective": args.objective, "cases": cases}))
    group.close()


def choose_cases(cluster, args: argparse.Namespace) -> Iterator[dict]:
    """Layouts to measure, the chosen one first."""
    from labinfer.base.config import CacheOptions
    from labinfer.planner.objective import EngineLimits, Stage, kv_blocks
    from labinfer.planner.problem import Problem
    from labinfer.planner.search import MEMORY_SHARE, find_layout, judge
    from labinfer.planner.workload import RequestLengths, Workload

    names = [machine.name for machine in cluster.machines]
    costs = {machine.name: machine.costs[0] for machine in cluster.machines}
    workload = Workload(
        tuple(RequestLengths(prompt=PROMPT, output=output) for output in output_lengths(args.objective))
    )
    counts_memory = args.objective == "memory"
    limits = EngineLimits(max_model_len=CONTEXT, max_num_seqs=SEQUENCES)
    if counts_memory:
        used = CacheOptions().memory_utilization
        limits = EngineLimits(
            max_model_len=ROOMY["max_model_len"], max_num_seqs=ROOMY["max_num_seqs"], memory_utilization=used
        )
    problem = Problem(cluster=cluster, request=workload.mean, limits=limits, objective=args.objective, first=names[0])
    best, seen = find_layout(problem), set()

    def case(name: str, solution) -> Iterator[dict]:
        layers = tuple(stage.end - stage.begin for stage in solution.stages)
        hosts = tuple(names.index(stage.machine) for stage in solution.stages)
        if (layers, hosts) not in seen:
            seen.add((layers, hosts))
            predicted = (
                kv_blocks(solution.stages, limits).num_blocks * limits.block_size
                if counts_memory
                else seconds(solution)
            )
            yield {
                "name": name,
                "layers": layers,
                "hosts": hosts,
                "in_flight": 1 if args.objective == "latency" else solution.criterion.num_batches,
                "predicted": predicted,
            }

    def seconds(solution) -> float:
        return solution.value * (1 if args.objective == "latency" else REQUESTS)

    def judged(layers, hosts):
        bounds = [0, *itertools.accumulate(layers)]
        stages = [
            Stage(machine=names[host], costs=costs[names[host]], begin=begin, end=end)
            for host, (begin, end) in zip(hosts, itertools.pairwise(bounds), strict=True)
        ]
        return judge(problem, stages)

    yield from case("chosen", best)
    total, share = len(costs[names[0]].layers), args.share
    if counts_memory:
        share, best = MEMORY_SHARE, find_layout(replace(problem, objective="throughput"))
    if args.slow_host:
        yield from case("with the slow host", find_layout(replace(problem, required=frozenset({names[-1]}))))
        return
    yield from case("even", judged([total // len(names)] * len(names), range(len(names))))
    yield from case("host 0 alone", judged([total], [0]))
    for count in range(2, len(names) + 1):
        for hosts in itertools.permutations(range(len(names)), count):
            if hosts[0] != 0:
                continue
            for cuts in itertools.combinations(range(STEP, total, STEP), count - 1):
                layers = [end - begin for begin, end in itertools.pairwise([0, *cuts, total])]
                solution = judged(layers, hosts)
                if solution is not None and best.value / solution.value >= share:
                    yield from case("split", solution)


def output_lengths(objective: str) -> list[int]:
    if objective == "latency":
        return [32]
    return [OUTPUTS[number % len(OUTPUTS)] for number in range(REQUESTS)]


def run_requests(llm, objective: str) -> float:
    """Seconds for all requests."""
    from labinfer import SamplingParams

    lengths = output_lengths(objective)
    prompts = [{"prompt_token_ids": [(17 + 7 * i + 3 * j) % 1000 for j in range(PROMPT)]} for i in range(len(lengths))]
    begin = time.perf_counter()
    llm.generate(prompts, [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths])
    return time.perf_counter() - begin


def report(figures: dict) -> None:
    from labinfer.observe.table import format_table

    most_counts = figures["objective"] == "memory"
    unit, digits = ("tokens", 0) if most_counts else ("s", 2)
    cases = sorted(figures["cases"], key=lambda case: case["measured"], reverse=most_counts)
    best = cases[0]["measured"]
    rows = [
        (
            case["name"],
            ",".join(map(str, case["layers"])),
            ",".join(map(str, case["hosts"])),
            f"{case['measured']:.{digits}f}",
            f"{case['predicted']:.{digits}f}",
            f"{100 * (case['predicted'] / case['measured'] - 1):+.1f}",
            f"{100 * (case['measured'] / best if most_counts else best / case['measured']):.1f}",
        )
        for case in cases
    ]
    header = ("layout", "layers", "hosts", f"measured {unit}", f"predicted {unit}", "error %", "of the best %")
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
