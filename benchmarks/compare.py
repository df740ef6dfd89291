"""This engine beside others on the workloads of ``workloads.py``: tokens a second, and ratios within each round.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python benchmarks/setup_peers.py
    python benchmarks/compare.py --model DIR --json figures.json

Each engine runs as ``peers/NAME_runner.py`` in a process and an environment of its own (``ENVS/NAME``), one after another,
with the same prompts, the same number of threads and bound to the same cores. A round takes each engine at each precision
once; figures are medians over the rounds, ratios medians of each round's ratio. Precisions are those of the weights. An engine
that can calculate in several dtypes stands there with each, as ``NAME-DTYPE``. A row "labinfer, of the limit" has the share of the limit that
this engine's figures are (``labinfer/cli/bench/workload_limits.py``), with roofline limits measured in each of its processes.

``--precisions Q8_0 Q4_0 Q4_K_M`` takes this engine, llama.cpp and OpenVINO over the same GGUF files, which llama.cpp's runner makes;
OpenVINO does not know all types that are in Q4_K_M.
``--workloads W1 W1-4k W1-16k`` takes W1 behind 4,000 and 16,000 tokens, too. ``--requests 8`` takes the first 8 of the 32 requests of W2
on every engine, for models of billions of parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from workloads import add_requests_option

from labinfer.cli.bench.workloads import NUM_REQUESTS, USUAL_WORKLOADS, BenchWorkload, draw_workloads

HERE = Path(__file__).parent
OURS = "labinfer"
USUAL_PRECISIONS = ("16-bit", "int8", "int4")
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
"""Precisions of GGUF files."""
PRECISIONS = (*USUAL_PRECISIONS, *GGUF_TYPES)
ENGINES = {
    OURS: PRECISIONS,
    "vllm": ("16-bit", "int8"),
    "openvino": PRECISIONS,
    "openvino-bf16": USUAL_PRECISIONS,
    "llamacpp": PRECISIONS,
    "ctranslate2": ("int8",),
    "transformers": ("16-bit",),
}
"""Precisions of weights that each engine runs here; its runner says how they are made. A name may end with a variant: the dtype
in which the engine calculates, where that is not the runner's own choice."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LIMIT_SECONDS = 1800

Figures = dict[str, float]
"""Tokens a second by workload."""
Round = dict[str, dict[str, Figures]]
"""Benchmark figures of one round, by precision and engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint in bfloat16 that all engines know")
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="folder of the peers' environments")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=USUAL_PRECISIONS)
    parser.add_argument("--workloads", nargs="+", choices=draw_workloads(), default=USUAL_WORKLOADS)
    add_requests_option(parser)
    parser.add_argument("--draft", type=Path, help="checkpoint of a draft model, for engines whose runner has them")
    parser.add_argument("--draft-tokens", type=int, default=3, help="that it drafts at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures of all rounds to this file")
    args = parser.parse_args()

    workloads = {name: work for name, work in draw_workloads(args.requests).items() if name in args.workloads}
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(args, workloads, Path(folder))
        engines = sorted(args.engines, key=lambda engine: engine != "llamacpp")  # it makes files that others read
        chosen = [
            (engine, precision)
            for engine in engines
            if launcher.is_installed(engine)
            for precision in ENGINES[engine]
            if precision in args.precisions and launcher.prepare(engine, precision)
        ]
        rounds: list[Round] = []
        for number in range(args.rounds):
            rounds.append({})
            for engine, precision in list(chosen):
                figures = launcher.run(engine, precision)
                if figures is None:
                    chosen.remove((engine, precision))  # another run would fail again
                    continue
                say(f"round {number + 1}: {engine} {precision} {format_figures(figures)}")
                rounds[-1].setdefault(precision, {})[engine] = figures
            if args.json:
                record = {
                    "threads": args.threads,
                    "requests": args.requests,
                    "shares": launcher.shares,
                    "versions": launcher.versions,
                    "rounds": rounds,
                }
                args.json.write_text(json.dumps(record, indent=1))
    print(markdown(rounds, list(workloads), args.requests, launcher.shares))


@dataclass
class Launcher:
    """Processes of the runners, with their cores, threads and environments."""

    args: argparse.Namespace
    workloads: dict[str, BenchWorkload]
    folder: Path

    def __post_init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.shares: dict[str, list[Figures]] = {}
        """Shares of the limits that this engine's figures are, by precision, for each round."""
        self._cores = set(sorted(os.sched_getaffinity(0))[: self.args.threads])
        if len(self._cores) < self.args.threads:
            sys.exit(f"--threads {self.args.threads} needs as many cores; there are {len(self._cores)}")
        self._workloads_file = self.folder / "workloads.json"
        self._workloads_file.write_text(
            json.dumps({name: dataclasses.asdict(work) for name, work in self.workloads.items()})
        )

    def is_installed(self, engine: str) -> bool:
        package, _ = split_name(engine)
        if not self._python(package).exists():
            say(f"{engine}: not installed; run python benchmarks/setup_peers.py --envs {self.args.envs} {package}")
            return False
        return True

    def prepare(self, engine: str, precision: str) -> bool:
        """Convert the checkpoint, before anything is measured. Returns whether it could be."""
        return self._call(engine, precision, "--prepare") is not None

    def run(self, engine: str, precision: str) -> Figures | None:
        """Tokens a second; None, after a line on standard error, if the run failed or the precision is not offered."""
        answer = self._call(engine, precision)
        self.versions |= {engine: answer.pop("version")} if answer else {}
        if answer and (limits := answer.pop("limits", None)):
            shares = {name: answer[name] / limit for name, limit in limits.items()}
            self.shares.setdefault(precision, []).append(shares)
        return answer

    def _python(self, package: str) -> Path:
        return Path(sys.executable) if package == OURS else self.args.envs.absolute() / package / "bin" / "python"

    def _call(self, engine: str, precision: str, *flags: str) -> dict | None:
        package, variant = split_name(engine)
        name = f"llamacpp-{precision}.gguf" if precision in GGUF_TYPES else f"{package}-{precision}"
        converted = self.args.envs.absolute() / "converted" / self.args.model.name / name
        command = [
            *(self._python(package), HERE / "peers" / f"{package}_runner.py"),
            *(("--variant", variant) if variant else ()),
            *("--checkpoint", self.args.model.absolute(), "--converted", converted),
            *("--workloads", self._workloads_file, "--precision", precision, "--threads", self.args.threads, *flags),
        ]
        if self.args.draft:
            command += ["--draft", self.args.draft.absolute(), "--draft-tokens", self.args.draft_tokens]
        env = os.environ | {name: str(self.args.threads) for name in THREAD_VARIABLES} | {"HF_HUB_OFFLINE": "1"}
        if package == OURS:  # this checkout, whether or not it is the one that is installed
            env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
        log = self.folder / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                list(map(str, command)),
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # some engines have worker processes, which must not outlive them
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
            try:
                out, _ = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                say(f"{engine} {precision}: not done after {LIMIT_SECONDS} s")
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        answer = last_json(out)
        if process.returncode or answer is None:
            why = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            say(f"{engine} {precision}: failed ({process.returncode}): {why}")
            return None
        if "skip" in answer:
            say(f"{engine} {precision}: {answer['skip']}")
            return None
        return answer


def split_name(engine: str) -> tuple[str, str]:
    """Package of an engine, and its variant; empty for its runner's own choice."""
    package, _, variant = engine.partition("-")
    return package, variant


def last_json(text: str) -> dict | None:
    """The last line that is a JSON object; engines print to standard output too."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def medians(rounds: list[Round], precision: str, engine: str) -> Figures:
    """Median of each workload, over the rounds in which the engine has figures."""
    taken = [by_precision[precision][engine] for by_precision in rounds if engine in by_precision.get(precision, {})]
    return {name: statistics.median(figures[name] for figures in taken) for name in taken[0]}


def ratios(rounds: list[Round], precision: str, peer: str) -> Figures:
    """Medians of the rounds' ratios of this engine's figures to a peer's."""
    both = [
        by_engine for by_engine in (figures.get(precision, {}) for figures in rounds) if {OURS, peer} <= set(by_engine)
    ]
    if not both:
        return {}
    return {
        name: statistics.median(figures[OURS][name] / figures[peer][name] for figures in both) for name in both[0][peer]
    }


def markdown(
    rounds: list[Round],
    workloads: list[str],
    num_requests: int = NUM_REQUESTS,
    shares: Mapping[str, list[Figures]] = MappingProxyType({}),
) -> str:
    """Two tables: tokens a second, and the ratios of this engine to each peer and to the best at each workload.

    Args:
        num_requests: requests of W2 that were run.
        shares: see ``Launcher.shares``.
    """
    rule = "|" + "---|" * (2 + len(workloads))
    fewer = {"W2": f"W2 ({num_requests} of {NUM_REQUESTS} requests)"} if num_requests < NUM_REQUESTS else {}
    titles = [fewer.get(name, name) for name in workloads]
    speed = [f"| engine | weights | {' | '.join(f'{title} tokens/s' for title in titles)} |", rule]
    against = [f"| ratio | weights | {' | '.join(titles)} |", rule]
    for precision in PRECISIONS:
        engines = list(dict.fromkeys(engine for figures in rounds for engine in figures.get(precision, {})))
        for engine in engines:
            figures = medians(rounds, precision, engine)
            speed.append(f"| {engine} | {precision} | {' | '.join(f'{figures[name]:.1f}' for name in workloads)} |")
            if engine == OURS and precision in shares:
                cells = [f"{statistics.median(taken[name] for taken in shares[precision]):.2f}" for name in workloads]
                speed.append(f"| {OURS}, of the limit | {precision} | {' | '.join(cells)} |")
        peers = [engine for engine in engines if engine != OURS]
        by_peer = {peer: ratio for peer in peers if (ratio := ratios(rounds, precision, peer))}
        for peer, ratio in by_peer.items():
            cells = [f"{ratio[name]:.2f}" for name in workloads]
            against.append(f"| {OURS} to {peer} | {precision} | {' | '.join(cells)} |")
        if by_peer:
            hardest = {name: min(by_peer, key=lambda peer, name=name: by_peer[peer][name]) for name in workloads}
            cells = [f"**{by_peer[peer][name]:.2f}** ({peer})" for name, peer in hardest.items()]
            against.append(f"| {OURS} to the best | {precision} | {' | '.join(cells)} |")
    return "\n".join([*speed, "", *against])


def format_figures(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


def say(text: str) -> None:
    sys.stderr.write(f"compare: {text}\n")


if __name__ == "__main__":
    main()
