"""Draw the figures of ``compare.py --json`` as bars: one picture a precision, one panel a workload.

pip install -e ".[bench]"
python benchmarks/plot.py figures.json --output docs/benchmarks
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from compare import OURS, PRECISIONS, Round, medians, split_name

from labinfer.cli.bench.workloads import NUM_REQUESTS

TITLES = {
    "W1": "W1: one request\ndecoded tokens/s",
    "W2": "W2: {requests} requests\noutput tokens/s",
    "W3": "W3: 2,048 in\nprompt tokens/s",
}
OUR_COLOUR, PEER_COLOUR = "#1f77b4", "#c7c7c7"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    record = json.loads(args.figures.read_text())
    rounds: list[Round] = record["rounds"]
    titles = {name: title.format(requests=record.get("requests", NUM_REQUESTS)) for name, title in TITLES.items()}
    args.output.mkdir(parents=True, exist_ok=True)
    for precision in PRECISIONS:
        engines = list(dict.fromkeys(engine for figures in rounds for engine in figures.get(precision, {})))
        if engines:
            path = args.output / f"peers-{precision}.png"
            draw({engine: medians(rounds, precision, engine) for engine in engines}, precision, path, titles)
            print(path)


def draw(figures: dict[str, dict[str, float]], precision: str, path: Path, titles: dict[str, str]) -> None:
    """Plot the figures: a panel for each workload with its title, a bar for each engine, the fastest on top."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    workloads = list(next(iter(figures.values())))
    shape = (3.4 * len(workloads), 0.9 + 0.38 * len(figures))
    picture, panels = pyplot.subplots(1, len(workloads), figsize=shape, layout="constrained", squeeze=False)
    for name, panel in zip(workloads, panels[0], strict=True):
        ranked = sorted(figures, key=lambda engine, name=name: figures[engine][name])
        bars = panel.barh(
            ranked,
            [figures[engine][name] for engine in ranked],
            color=[OUR_COLOUR if split_name(engine)[0] == OURS else PEER_COLOUR for engine in ranked],
        )
        panel.bar_label(bars, fmt="%.0f", padding=3)
        panel.margins(x=0.18)
        panel.set_title(titles.get(name, name), fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    picture.suptitle(f"{precision} weights", fontsize=11)
    picture.savefig(path, dpi=130)
    pyplot.close(picture)


if __name__ == "__main__":
    main()
