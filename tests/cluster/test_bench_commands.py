"""The benchmarks of the engine, launched for real on the model that comes with it; those of two stages with a chart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

COMMANDS = {
    "latency": (
        ("--batch-size", "2", "--output-len", "8", "--num-iters-warmup", "1", "--num-iters", "2"),
        "whole batch",
        "latencies",
    ),
    "throughput": (("--num-prompts", "4", "--output-len", "60"), "output tokens", "tokens_per_second"),
    "serve": (
        ("--num-prompts", "4", "--output-len", "60", "--request-rate", "100", "--goodput", "e2el:60000"),
        "E2EL",
        "p99_itl_ms",
    ),
}
"""Its options, what its table has, and what its JSON has."""
LAYOUTS = {"single": (1, ()), "mpirun": (2, ("--pipeline-parallel-size", "2")), "torchrun": (2, ("-tp", "2"))}
COLOURS = {"prefill": (0xE6, 0x9F, 0x00), "decode": (0x56, 0xB4, 0xE9)}


SAMPLE = set(zip(COMMANDS, LAYOUTS, strict=True))
ALL = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow)
    for case in itertools.product(COMMANDS, LAYOUTS)
]


@pytest.mark.parametrize(("command", "launcher"), ALL)
def test_each_benchmark_runs_under_each_launcher(command, launcher, launches, tmp_path):
    options, row, key = COMMANDS[command]
    ranks, layout = LAYOUTS[launcher]
    file, chart, trace = (tmp_path / name for name in ("figures.json", "chart.png", "trace.json"))
    is_drawn = launcher == "mpirun"
    drawn = ("--plot", chart, "--trace", trace) if is_drawn else ()
    done = launches.run(launcher, ranks, "bench", command, *options, *layout, "--output-json", file, *drawn)
    assert done.returncode == 0, done.text
    assert done.stdout.count(row) == 1, done.text
    record = json.loads(file.read_text())
    assert record["model"] == "demo" and record["num_ranks"] == ranks and record[key]
    if is_drawn:
        assert trace.stat().st_size > 0
        check_chart(chart, shows_prefill=command == "latency")  # how a batch begins, against the middle of many steps


def check_chart(file: Path, shows_prefill: bool) -> None:
    """Both stages are drawn, with steps of the same kinds."""
    image = pytest.importorskip("matplotlib.image")
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = (image.imread(file)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == 2100 and 400 < pixels.shape[0] < 800
    rows = pixels[: int(0.7 * pixels.shape[0])]  # the legend is under them
    upper, lower = (colours_in(half) for half in (rows[: len(rows) // 2 + 20], rows[len(rows) // 2 + 20 :]))
    assert upper == lower and "decode" in upper
    assert ("prefill" in upper) == shows_prefill


def colours_in(pixels) -> set[str]:
    return {name for name, colour in COLOURS.items() if (abs(pixels - colour).sum(axis=2) < 6).sum() > 500}
