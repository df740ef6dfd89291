"""``launch.py simulate`` from measured costs beside ``bench serve`` on the same layouts (Linux, root).

    python tools/random_checkpoint.py --shape small --layers 24 --dtype bfloat16 DIR
    python benchmarks/simulated_serving.py --model DIR

Four equal hosts (``namespace_hosts.py``). Two of them are probed. From their costs and the link between them, two, three and four stages
are simulated, and then measured: requests that arrive by a Poisson process, at --load of the rate that the simulation comes to when all of
them are there at once, and those that are all there at once. In turn, --rounds times; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from namespace_cables import address
from namespace_hosts import TRANSPORTS, hosts

from labinfer.observe.table import format_table
from labinfer.planner.cluster import Cluster

LAUNCH = str(Path(__file__).parent.parent / "launch.py")
QUOTA, NUM_HOSTS = 0.3, 4
STAGES = (2, 3, 4)
SIZES = ["--max-model-len", "512", "--num-kv-blocks", "1024", "--max-num-seqs", "32", "--no-enable-prefix-caching"]
REQUESTS = ["--input-len", "64", "--output-len", "32", "--num-prompts", "60", "--num-warmups", "2"]
FIGURES = {"output_throughput": "tokens/s", "median_ttft_ms": "TTFT p50 ms", "median_tpot_ms": "TPOT p50 ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--load", type=float, default=0.6, help="of the highest rate, for requests that arrive one by one"
    )
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of each link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="also write all figures to this file")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("namespaces and quotas need root")
    with (
        tempfile.TemporaryDirectory() as directory,
        hosts(Path(directory), (QUOTA,) * NUM_HOSTS, delays=[0.0] * NUM_HOSTS, mbit=args.mbit) as launcher,
    ):
        trial = Trial(Path(directory), launcher, os.path.abspath(args.model))
        trial.probe()
        cases = [case for stages in STAGES for case in trial.cases(stages, args.load)]
        for _ in range(args.rounds):
            for case in cases:
                case["rounds"].append(trial.measure(case["stages"], case["flags"]))
                print(case["stages"], case["flags"], case["simulated"], case["rounds"][-1], flush=True)
    report(cases)
    if args.json:
        Path(args.json).write_text(json.dumps(cases, indent=1))


class Trial:
    """Simulations and launches with the same flags.

    Args:
        directory: for files.
        launcher: what starts a rank on each host, as ``hosts`` gives it.
    """

    def __init__(self, directory: Path, launcher: list[str], model: str):
        self._directory, self._model = directory, model
        self._launcher = launcher

    def probe(self) -> None:
        """Measure two hosts and their link."""
        self._cluster = self._directory / "probed.json"
        self._launch(2, "probe", "--model", self._model, "--max-model-len=512", "--save", str(self._cluster))

    def cases(self, stages: int, load: float) -> list[dict]:
        """Cases at ``load`` with both kinds of request arrivals (all at once, and Poisson), with the simulated figures."""
        at_once = [*SIZES, *REQUESTS, "--request-rate=inf"]
        figures = self._simulate(stages, at_once)
        rate = load * figures["request_throughput"]
        arriving = [*SIZES, *REQUESTS, f"--request-rate={rate:.3f}"]
        cases = [("at once", at_once, figures), ("arriving", arriving, self._simulate(stages, arriving))]
        return [
            {
                "stages": stages,
                "name": name,
                "flags": flags,
                "simulated": {key: figures[key] for key in FIGURES},
                "rounds": [],
            }
            for name, flags, figures in cases
        ]

    def measure(self, stages: int, flags: list[str]) -> dict[str, float]:
        output = self._directory / "measured.json"
        self._launch(
            stages, "bench", "serve", "--model", self._model, "-pp", str(stages), *flags, "--output-json", str(output)
        )
        figures = json.loads(output.read_text())
        return {key: figures[key] for key in FIGURES}

    def _simulate(self, stages: int, flags: list[str]) -> dict[str, float]:
        described, output = self._directory / "cluster.json", self._directory / "simulated.json"
        described.write_text(json.dumps(self._repeat(stages)))
        command = [sys.executable, LAUNCH, "simulate", "--cluster", str(described), "-pp", str(stages), *flags]
        subprocess.run([*command, "--output-json", str(output)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())

    def _repeat(self, stages: int) -> dict:
        """The cluster with as many machines as stages: the first one, and others like the second one."""
        probed = Cluster.read([str(self._cluster)])
        first, second = (machine.name for machine in probed.machines)
        link = probed.link(first, second)
        cluster = json.loads(self._cluster.read_text())
        cluster["links"] = []
        cluster["default_link"] = {"latency": link.latency, "bytes_per_second": link.bytes_per_second}
        cluster["machines"][1]["count"] = stages - 1
        return cluster

    def _launch(self, num_hosts: int, *words: str) -> None:
        rsh, at, *mpirun = self._launcher
        mpirun[mpirun.index("-hosts") + 1] = ",".join(map(address, range(num_hosts)))
        mpirun[mpirun.index("-n") + 1] = str(num_hosts)
        command = [rsh, at, *mpirun, sys.executable, LAUNCH, *words, "--log-level=warning", "--no-autotune"]
        subprocess.run(command, check=True, env=os.environ | TRANSPORTS, stdout=subprocess.DEVNULL)


def report(cases: list[dict]) -> None:
    rows = []
    for case in cases:
        for key, title in FIGURES.items():
            measured = statistics.median(figures[key] for figures in case["rounds"])
            spread = " to ".join(f"{choose(figures[key] for figures in case['rounds']):.1f}" for choose in (min, max))
            simulated = case["simulated"][key]
            error = f"{100 * (simulated / measured - 1):+.1f}"
            rows.append((case["stages"], case["name"], title, f"{simulated:.1f}", f"{measured:.1f}", spread, error))
    print(format_table(("stages", "requests", "figure", "simulated", "measured", "of", "error %"), rows))


if __name__ == "__main__":
    main()
