"""Time of a step against all that it grows with: rows, sequences, context, layers, each with one thread and with two.

    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 DIR
    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 --layers 12 DIR12
    python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 --layers 6 DIR6
    python benchmarks/growth.py --models DIR6 DIR12 DIR --plot growth.png --json growth.json

Rows are those of a prompt, sequences and context those of steps that decode. From point to point the growth is the exponent of the
line between them: 1 is in proportion, 0 is none. Medians over the rounds, through ``LLM`` in one process; the last model is that of
all but the layers. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from labinfer import LLM, SamplingParams
from labinfer.observe.table import format_table

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2000, 4000, 8000)
DECODED, CONTEXT = 16, 128

Curve = dict[int, float]
"""Milliseconds of a step by what it grows with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="checkpoints that differ in their layers")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    curves: dict[str, dict[str, Curve]] = {}
    for threads in args.threads:
        name = f"{threads} thread{'s' * (threads > 1)}"
        layers: dict[str, Curve] = {"layers, 1 row": {}, "layers, 256 rows": {}}
        for model in args.models:
            print(f"{model}, {name}:", file=sys.stderr)
            with launch(model, threads, args.quantization) as llm:
                steps = Steps(llm, args.rounds)
                layers["layers, 1 row"][llm.layout.config.num_layers] = steps.decode(1, CONTEXT)
                layers["layers, 256 rows"][llm.layout.config.num_layers] = steps.prompt(256)
                if model == args.models[-1]:
                    curves.setdefault("rows", {})[name] = {rows: steps.prompt(rows) for rows in ROWS}
                    curves.setdefault("sequences", {})[name] = {n: steps.decode(n, CONTEXT) for n in SEQUENCES}
                    curves.setdefault("context", {})[name] = {n: steps.decode(1, n) for n in CONTEXTS}
        for kind, curve in layers.items():
            curves.setdefault(kind, {})[name] = curve
        if args.json:
            args.json.write_text(json.dumps(curves, indent=1))
    print("\n\n".join(describe(kind, by_threads) for kind, by_threads in curves.items()))
    if args.plot:
        draw(curves, args.plot)


def launch(model: Path, threads: int, quantization: str) -> LLM:
    return LLM(
        str(model),
        threads=threads,
        quantization=quantization,
        max_model_len=max(CONTEXTS) + 2 * DECODED,
        num_kv_blocks=1600,
        max_num_batched_tokens=2048,
        chunked_prefill_size=2048,
        enable_prefix_caching=False,
        log_level="warning",
    )


class Steps:
    """Milliseconds of steps through one engine."""

    def __init__(self, llm: LLM, rounds: int):
        self._llm, self._rounds = llm, rounds

    def prompt(self, rows: int) -> float:
        """A step of a prompt of so many tokens, from the request to its token."""
        return self._median(f"{rows} row{'s' * (rows > 1)}", lambda: self._run([rows], 1).time_to_first_token[0])

    def decode(self, sequences: int, context: int) -> float:
        """A step of one token for each of so many sequences, behind that context: the fastest answer waits for no prompts of others."""
        rounds = self._rounds if sequences * context < 8000 else 1  # reading a long prompt takes a minute
        name = f"{sequences} sequence{'s' * (sequences > 1)} behind {context} tokens"
        return self._median(name, lambda: min(self._run([context] * sequences, DECODED).time_per_output_token), rounds)

    def _run(self, lengths: Iterable[int], num_tokens: int):
        prompts = [[10 + (7 * i + number) % 3000 for i in range(length)] for number, length in enumerate(lengths)]
        self._llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0))
        return self._llm.report

    def _median(self, name: str, seconds: Callable[[], float], rounds: int = 0) -> float:
        taken = [seconds() for _ in range((rounds or self._rounds) + 1)]
        median = 1e3 * statistics.median(taken[1:] if rounds != 1 else taken)  # the first warms up
        print(f"{name}: {median:.1f} ms", file=sys.stderr, flush=True)
        return median


def exponents(curve: Curve) -> dict[int, float]:
    """Slope of the line to each point from the one before, in logarithms."""
    points = sorted(curve.items())
    return {
        size: math.log(time / before_time) / math.log(size / before)
        for (before, before_time), (size, time) in zip(points, points[1:], strict=False)
    }


def describe(kind: str, by_threads: dict[str, Curve]) -> str:
    """A table of one kind of growth."""
    slopes = {name: exponents(curve) for name, curve in by_threads.items()}
    rows = [
        (
            str(size),
            *(
                f"{curve[size]:.1f} ({slopes[name][size]:.2f})" if size in slopes[name] else f"{curve[size]:.1f}"
                for name, curve in by_threads.items()
            ),
        )
        for size in next(iter(by_threads.values()))
    ]
    return format_table((kind, *(f"{name}, ms" for name in by_threads)), rows)


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """Plot the curves, one panel for each kind of growth; both axes are logarithmic, so that linear growth is a diagonal."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    picture, panels = pyplot.subplots(1, len(curves), figsize=(3.2 * len(curves), 3.2), layout="constrained")
    for (kind, by_threads), panel in zip(curves.items(), panels, strict=True):
        for name, curve in by_threads.items():
            panel.loglog([*curve], [*curve.values()], marker="o", markersize=3, label=name)
        first, last = min(curve), max(curve)
        panel.loglog([first, last], [curve[first], curve[first] * last / first], ":", color="grey", linewidth=1)
        panel.set_title(kind, fontsize=10)
        panel.set_ylabel("ms a step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    picture.savefig(path, dpi=130)
    pyplot.close(picture)


if __name__ == "__main__":
    main()
