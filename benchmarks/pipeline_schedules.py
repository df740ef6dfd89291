"""Bubble fraction and speed of pipeline schedules, on equal requests, in one launch.

    python tools/random_checkpoint.py --shape small /tmp/small
    mpirun -n 2 python benchmarks/pipeline_schedules.py --model /tmp/small
    torchrun --nproc-per-node 2 benchmarks/pipeline_schedules.py --model /tmp/small

One stage a rank. Rounds of the schedules alternate, so that a disturbance hits all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from launched import launched, medians

from labinfer import SamplingParams
from labinfer.base.config import PIPELINE_SCHEDULES
from labinfer.base.plugins import PLUGINS, find_plugin
from labinfer.observe.table import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--plugin", action="append", default=[], help="also compare the schedules of a plugin")
    parser.add_argument(
        "--schedules", nargs="+", help="compare only these, with lockstep as the yardstick (default: all)"
    )
    args = parser.parse_args()
    PLUGINS.load(map(find_plugin, args.plugin))  # the names of its schedules are asked for before the ranks meet
    schedules = dict.fromkeys(["lockstep", *(args.schedules or PIPELINE_SCHEDULES)])

    # Without a prefix cache: the rounds repeat their prompts.
    flat = {"model": args.model, "dtype": "float32", "memory_utilization": 0.2, "enable_prefix_caching": False}
    prompts = [[3 + (7 * i + 11 * j) % 500 for j in range(args.prompt_tokens)] for i in range(args.requests)]
    params = SamplingParams(max_tokens=args.output_tokens, ignore_eos=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in schedules}
    with launched({name: flat | {"pipeline_schedule": name} for name in schedules}, args.plugin) as llms:
        for round_number in range(args.rounds + 1):
            for name, llm in llms.items():
                report = llm.generate(prompts, params) and llm.report
                if report and round_number > 0:  # the first round warms up
                    speed = report.output_tokens / report.wall_time
                    rounds[name].append({"bubble": report.mean_bubble, "speed": speed})
        if report:
            figures = {name: medians(taken) for name, taken in rounds.items()}
            slowest = figures["lockstep"]["speed"]
            rows = [
                (name, f"{100 * values['bubble']:.1f} %", f"{values['speed']:.0f}", f"{values['speed'] / slowest:.2f}")
                for name, values in figures.items()
            ]
            print(format_table(("schedule", "bubble", "output tokens/s", "speed / lockstep"), rows))
            if args.json:
                args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
