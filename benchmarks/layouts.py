"""The batch workload on several layouts of the same cores: one rank with all threads, and ranks with a thread each.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/layouts.py --model DIR

W2 of ``workloads.py``, or another one with --workload, through ``launch.py bench throughput``, every layout in a launch of its own, one
after another in each round; output tokens/s are medians, ratios are taken within a round. Other flags go to ``launch.py``.

With --mbit the stages of a pipeline also stand on two hosts that are network namespaces, a core and a device of that rate each (root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from namespace_hosts import TRANSPORTS, hosts
from workloads import BATCH_TOKENS, BLOCKS, CONTEXT, draw_workloads

from labinfer.observe.table import format_table

LAUNCH = Path(__file__).parent.parent / "launch.py"
RANKS = 2
MPIRUN, TORCHRUN = ["mpirun", "-n", str(RANKS), sys.executable], ["torchrun", "--nproc-per-node", str(RANKS)]
ALONE = f"1 rank, {RANKS} threads"
LAYOUTS = {
    ALONE: ([sys.executable], ["--threads", str(RANKS)]),
    "pp 2, mpirun": (MPIRUN, ["-pp", str(RANKS)]),
    "pp 2, torchrun": (TORCHRUN, ["-pp", str(RANKS)]),
    "tp 2, mpirun": (MPIRUN, ["-tp", str(RANKS)]),
    "tp 2, torchrun": (TORCHRUN, ["-tp", str(RANKS)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="beside the first one")
    parser.add_argument("--workload", choices=("W1", "W2"), default="W2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--mbit", type=float, default=0.0, help="rate of a link between two hosts; 0 for no such layout"
    )
    args, flags = parser.parse_known_args()

    layouts = {name: layout for name, layout in LAYOUTS.items() if name in (ALONE, *args.layouts)}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        requests = Path(directory) / "requests.jsonl"
        write_requests(requests, args.workload)
        if args.mbit:
            (files := Path(directory) / "hosts").mkdir()
            mpirun = stack.enter_context(hosts(files, (1.0,) * RANKS, delays=[0.0] * RANKS, mbit=args.mbit))
            layouts[f"pp {RANKS}, {args.mbit:g} Mbit/s"] = ([*mpirun, sys.executable], ["-pp", str(RANKS)])
        for _ in range(args.rounds):
            rounds.append(
                {
                    name: measure(launcher, requests, ["--model", args.model, *own, *flags])
                    for name, (launcher, own) in layouts.items()
                }
            )
    rows = []
    for name in layouts:
        speed = statistics.median(figures[name] for figures in rounds)
        ratio = statistics.median(figures[name] / figures[ALONE] for figures in rounds)
        rows.append((name, f"{speed:.1f}", f"{ratio:.2f}"))
    print(format_table((args.workload, "tokens/s", "ratio"), rows))


def write_requests(path: Path, name: str) -> None:
    workload = draw_workloads()[name]
    lines = [
        {"prompt_token_ids": ids, "max_tokens": out, "ignore_eos": True}
        for ids, out in zip(workload.prompts, workload.output_lens, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(launcher: list[str], requests: Path, flags: list[str]) -> float:
    """Output tokens a second.

    Raises:
        RuntimeError: the launch failed.
    """
    figures = requests.with_name("figures.json")
    sizes = {
        "max-model-len": CONTEXT,
        "num-kv-blocks": BLOCKS,
        "max-num-batched-tokens": BATCH_TOKENS,
        "chunked-prefill-size": BATCH_TOKENS,
        "num-prompts": len(requests.read_text().splitlines()),
        "num-warmups": 2,
    }
    command = [*launcher, str(LAUNCH), "bench", "throughput", "--dataset", str(requests), "--output-json", str(figures)]
    command += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    env = os.environ | (TRANSPORTS if "-hosts" in launcher else {})
    done = subprocess.run([*command, *flags], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"a launch ended with status {done.returncode}: {done.stderr}")
    return json.loads(figures.read_text())["output_tokens_per_second"]


if __name__ == "__main__":
    main()
