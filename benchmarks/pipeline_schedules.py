"""Bubble fraction and speed of the three pipeline schedules, on equal requests, in one launch.

    python tools/random_checkpoint.py --shape small /tmp/small
    mpirun -n 2 python benchmarks/pipeline_schedules.py --model /tmp/small
    torchrun --nproc-per-node 2 benchmarks/pipeline_schedules.py --model /tmp/small

One stage a rank. Rounds of the schedules alternate, so that a disturbance hits all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from labinfer import SamplingParams
from labinfer.config import PIPELINE_SCHEDULES, EngineOptions
from labinfer.executor.failure import end_group_on_uncaught
from labinfer.executor.group import join_group
from labinfer.llm import LLM
from labinfer.observe.table import format_table
from labinfer.spmd.environment import detect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    args = parser.parse_args()

    # Without a prefix cache: the rounds repeat their prompts.
    flat = {"model": args.model, "dtype": "float32", "memory_utilization": 0.2, "enable_prefix_caching": False}
    base = EngineOptions.from_flat(flat)
    group = join_group(detect(), base.parallel, base.runtime)
    end_group_on_uncaught(group)
    llms = {}
    for name in PIPELINE_SCHEDULES:
        options = EngineOptions.from_flat(flat | {"pipeline_parallel_size": group.size, "pipeline_schedule": name})
        llms[name] = LLM.from_options(group, options)
    prompts = [[3 + (7 * i + 11 * j) % 500 for j in range(args.prompt_tokens)] for i in range(args.requests)]
    params = SamplingParams(max_tokens=args.output_tokens, ignore_eos=True)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in PIPELINE_SCHEDULES}
    for round_number in range(args.rounds + 1):
        for name, llm in llms.items():
            llm.generate(prompts, params)
            if llm.is_rank0 and round_number > 0:  # the first round warms up
                figures[name].append((llm.report.mean_bubble, llm.report.output_tokens / llm.report.wall_time))
    if group.rank == 0:
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in figures.items()
        }
        rows = [
            (name, f"{100 * bubble:.1f} %", f"{speed:.0f}", f"{speed / medians['lockstep'][1]:.2f}")
            for name, (bubble, speed) in medians.items()
        ]
        print(format_table(("schedule", "bubble", "output tokens/s", "speed / lockstep"), rows))
        if args.json:
            args.json.write_text(
                json.dumps({name: {"bubble": values[0], "speed": values[1]} for name, values in medians.items()})
            )
    group.close()


if __name__ == "__main__":
    main()
