"""What the prefix cache saves: requests that share a long system prompt, with the cache and without, in one launch.

    python tools/random_checkpoint.py --shape small /tmp/small
    python benchmarks/prefix_cache.py --model /tmp/small

Rounds alternate; each round's shared prompt is new, so that it finds nothing of the round before. Figures are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics

from labinfer import SamplingParams
from labinfer.config import EngineOptions
from labinfer.executor.failure import end_group_on_uncaught
from labinfer.executor.group import join_group
from labinfer.llm import LLM
from labinfer.observe.table import format_table
from labinfer.spmd.environment import detect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shared-tokens", type=int, default=1000)
    parser.add_argument("--own-tokens", type=int, default=24)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    base = EngineOptions.from_flat({"model": args.model})
    group = join_group(detect(), base.parallel, base.runtime)
    end_group_on_uncaught(group)
    llms = {}
    for name, cached in (("on", True), ("off", False)):
        flat = {"model": args.model, "dtype": "float32", "memory_utilization": 0.2, "enable_prefix_caching": cached}
        llms[name] = LLM.from_options(group, EngineOptions.from_flat(flat))
    params = SamplingParams(max_tokens=args.output_tokens, ignore_eos=True)
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in llms}
    rng = random.Random(0)
    for round_number in range(args.rounds + 1):
        shared = _tokens(rng, args.shared_tokens)
        prompts = [shared + _tokens(rng, args.own_tokens) for _ in range(args.requests)]
        for name, llm in llms.items():
            outputs = llm.generate(prompts, params)
            if outputs and round_number > 0:  # the first round warms up
                hits = sum(output.num_cached_tokens for output in outputs) / (args.requests * args.shared_tokens)
                first = statistics.mean(output.time_to_first_token for output in outputs)
                figures[name].append((hits, first, llm.report.wall_time))
    if group.rank == 0:
        medians = {name: [statistics.median(c) for c in zip(*rows, strict=True)] for name, rows in figures.items()}
        rows = [
            (name, f"{100 * hits:.1f} %", f"{1000 * first:.0f} ms", f"{medians['off'][1] / first:.1f}", f"{wall:.2f} s")
            for name, (hits, first, wall) in medians.items()
        ]
        print(
            format_table(("prefix cache", "shared tokens found", "mean time to first token", "speed-up", "wall"), rows)
        )
    group.close()


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(count)]


if __name__ == "__main__":
    main()
