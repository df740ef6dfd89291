"""Bubble fraction, speed and latencies of the batch policies, on long prompts among answers, in one launch.

    python tools/random_checkpoint.py --shape small /tmp/small
    mpirun -n 2 python benchmarks/batch_policies.py --model /tmp/small
    torchrun --nproc-per-node 2 benchmarks/batch_policies.py --model /tmp/small

One stage a rank. The same requests come in two ways: all at once, as in a job, and one by one as to a server, with
exponential gaps, at a fraction of the speed that the round showed for all at once. Lengths are log-uniform: a few long
among many short ones. The policies alternate within a round, so that a disturbance hits all of them; figures are
medians over the rounds, and ratios medians of each round's ratio. Time without any request is not part of a bubble.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from pathlib import Path

from launched import launched, medians

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.cli.bench.arrivals import Arrivals
from labinfer.observe.table import format_seconds, format_table, percentile

POLICIES = ("greedy", "balanced", "throttle")

Figures = dict[str, float]
"""Figures of a run, by name; times in seconds, bubbles as fractions."""
Work = list[tuple[list[int], int]]
"""Prompts, and the number of tokens of each answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(200, 1500), metavar=("LOW", "HIGH"))
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(20, 200), metavar=("LOW", "HIGH"))
    parser.add_argument("--load", type=float, default=0.9, help="arrivals, as a fraction of what all at once allows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures of all rounds to this file")
    args = parser.parse_args()

    rng = random.Random(0)
    work = [(_tokens(rng, args.prompt_tokens), _log_uniform(rng, args.output_tokens)) for _ in range(args.requests)]
    gaps = [0.0, *(rng.expovariate(1.0) for _ in work[1:])]
    # Without a prefix cache: the rounds repeat their prompts.
    flat = {"model": args.model, "dtype": "float32", "memory_utilization": 0.2, "enable_prefix_caching": False}
    with launched({policy: flat | {"batch_policy": policy} for policy in POLICIES}) as llms:
        for llm in llms.values():
            measure(llm, work[:3], [0.0] * 3)  # to warm up
        rounds: dict[str, list[dict[str, Figures]]] = {"all at once": [], "one by one": []}
        for _ in range(args.rounds):
            due = [0.0] * len(work)
            for way in rounds:
                by_policy = {policy: measure(llm, work, due) for policy, llm in llms.items()}
                rounds[way].append(by_policy)
                if llms["greedy"].is_rank0:
                    mean_gap = (
                        statistics.fmean(figures["wall"] for figures in by_policy.values()) / len(work) / args.load
                    )
                    due = [mean_gap * elapsed for elapsed in itertools.accumulate(gaps)]
        if llms["greedy"].is_rank0:
            print(f"{len(work)} prompts of {sum(len(p) for p, _ in work)} tokens, answers of {sum(n for _, n in work)}")
            for way, figures in rounds.items():
                print(f"\n{way}" + f", {args.load:.0%} load" * (way == "one by one"))
                print(as_table(figures))
            if args.json:
                args.json.write_text(json.dumps(rounds))


def measure(llm: LLM, work: Work, due: list[float]) -> Figures | None:
    """Run the work, each prompt arriving at its second of ``due``. Returns None on ranks other than 0."""
    if not llm.is_rank0:
        llm.follow()
        return None
    requests = [
        llm.make_request(index, prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        for index, (prompt, count) in enumerate(work)
    ]
    arrivals = Arrivals(llm, requests, due)
    first = [output.time_to_first_token + arrivals.late[output.key] for output in llm.run(arrivals)]
    report = llm.report
    bubbles = [1 - worker.busy_time / (report.wall_time - arrivals.empty_time) for worker in report.workers]
    return {
        "wall": report.wall_time,
        "bubble": statistics.fmean(bubbles),
        **{f"bubble of rank {rank}": bubble for rank, bubble in enumerate(bubbles)},
        "output tokens/s": report.output_tokens / report.wall_time,
        "tokens/s": (report.prompt_tokens + report.output_tokens) / report.wall_time,
        "time per output token, p50": percentile(report.time_per_output_token, 0.5),
        "time per output token, p99": percentile(report.time_per_output_token, 0.99),
        "time to first token, p50": percentile(first, 0.5),
        "time to first token, p99": percentile(first, 0.99),
    }


def as_table(rounds: list[dict[str, Figures]]) -> str:
    """Medians of each policy's figures, and of their ratios to greedy's in the same round."""
    columns = {policy: medians([figures[policy] for figures in rounds]) for policy in POLICIES}
    for policy in POLICIES[1:]:
        columns[f"{policy} / greedy"] = medians(
            [
                {name: figures[policy][name] / figures["greedy"][name] for name in figures["greedy"]}
                for figures in rounds
            ]
        )
    rows = [
        (name, *(_format("" if "/" in column else name, values[name]) for column, values in columns.items()))
        for name in columns["greedy"]
    ]
    return format_table(("", *columns), rows)


def _format(name: str, value: float) -> str:
    if name == "":  # a ratio
        return f"{value:.2f}"
    if name.startswith("bubble"):
        return f"{100 * value:.1f} %"
    return f"{value:.0f}" if name.endswith("/s") else format_seconds(value)


def _log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _tokens(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(_log_uniform(rng, bounds))]


if __name__ == "__main__":
    main()
