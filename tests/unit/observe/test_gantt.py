"""The Gantt chart of a benchmark: which steps, what is at work when, and the picture."""

from __future__ import annotations

import sys

import pytest

from labinfer.base.errors import UserError
from labinfer.cli.bench.options import BenchOptions, LatencyOptions, LoadOptions
from labinfer.cli.commands.gantt import GAP, ROW, draw_gantt, row_places
from labinfer.cli.commands.plot_file import check_plot, save_plot
from labinfer.observe.gantt import NUM_STEPS, Bar, Gantt, Row, make_bars, make_gantt, micro_batch_kind
from labinfer.observe.trace import Slice, Track


def slices_of(*slices: tuple) -> list[Slice]:
    """From (name, begin, end, step_id), decodes of 4 tokens."""
    return [
        Slice(name=name, begin=begin, end=end, step_id=step, num_tokens=4, num_decodes=4)
        for name, begin, end, step in slices
    ]


def step_of(step: int, begin: int, wait: int, tokens: int = 4, decodes: int = 4) -> list[Slice]:
    """A step as a second stage records it: 2 to prepare, some time to wait, 6 to run, 2 to sample, 1 to send."""
    run = begin + 2 + wait
    parts = [
        ("step", begin, run + 9),
        ("prepare", begin, begin + 2),
        ("wait for activations", begin + 2, run),
        ("run", run, run + 6),
        ("sample", run + 6, run + 8),
        ("send", run + 8, run + 9),
    ]
    return [
        Slice(name=name, begin=start, end=end, step_id=step, num_tokens=tokens, num_decodes=decodes)
        for name, start, end in parts
    ]


def track_of(stage: int, slices: list[Slice], rank: int | None = None) -> Track:
    return Track(stage if rank is None else rank, stage, 0, slices)


@pytest.mark.parametrize(
    ("tokens", "decodes", "kind"), [(4, 4, "decode"), (1, 1, "decode"), (4, 0, "prefill"), (4, 1, "mixed")]
)
def test_micro_batch_is_of_a_kind(tokens, decodes, kind):
    assert (
        micro_batch_kind(Slice(name="run", begin=0, end=1, step_id=0, num_tokens=tokens, num_decodes=decodes)) == kind
    )


def test_bar_ends_where_the_rank_waits():
    assert make_bars(step_of(7, begin=0, wait=10)) == [Bar(0, 2, 7, "decode", 4), Bar(12, 20, 7, "decode", 4)]


def test_what_is_not_waited_for_is_one_bar_from_prepare_to_sample():
    slices = slices_of(("step", 0, 30, 1), ("prepare", 1, 3, 1), ("run", 4, 20, 1), ("sample", 20, 25, 1))
    assert make_bars([*slices, *slices_of(("send", 25, 30, 1))]) == [Bar(1, 25, 1, "decode", 4)]


def test_steps_one_right_after_the_other_are_two_bars():
    found = make_bars(slices_of(("run", 0, 10, 1), ("run", 10, 20, 2)))
    assert [(bar.begin, bar.end, bar.step_id) for bar in found] == [(0, 10, 1), (10, 20, 2)]


def test_chart_begins_with_its_first_step_and_ends_with_its_last():
    """Step 1 of steps 0 to 2, on two stages of which the second is a step behind; what lies over the ends is cut."""
    first = slices_of(("run", 0, 10, 0), ("run", 10, 20, 1), ("wait for tokens", 20, 30, 0), ("run", 30, 50, 2))
    second = slices_of(
        ("run", 8, 18, 0), ("wait for activations", 18, 22, 1), ("run", 22, 40, 1), ("wait for a plan", 40, 45, -1)
    )
    second += slices_of(("run", 45, 55, 2))
    gantt = make_gantt([track_of(1, second), track_of(0, first)], [1])
    assert (list(gantt.steps), gantt.duration) == ([1], 30)  # from 10 to 40
    assert [(row.rank, row.stage) for row in gantt.rows] == [(0, 0), (1, 1)]
    upper, lower = gantt.rows
    assert [bar[:3] for bar in upper.bars] == [(0, 10, 1), (20, 30, 2)] and upper.waits == [(10, 20)]
    assert [bar[:3] for bar in lower.bars] == [(0, 8, 0), (12, 30, 1)] and lower.waits == [(8, 12)]
    assert upper.busy == pytest.approx(20 / 30) and lower.busy == pytest.approx(26 / 30)


def test_ranks_of_a_stage_stand_together():
    tracks = [track_of(stage, step_of(0, 0, 0), rank) for rank, stage in ((3, 1), (1, 0), (2, 1), (0, 0))]
    gantt = make_gantt(tracks, [0])
    assert [(row.stage, row.rank) for row in gantt.rows] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert row_places(gantt.rows) == pytest.approx([0, ROW, 2 * ROW + GAP, 3 * ROW + GAP])


def many(count: int) -> list[Slice]:
    return [part for step in range(count) for part in step_of(step, 20 * step, 1)]


@pytest.mark.parametrize(
    ("measured", "first", "count"),
    [
        (range(100), 35, NUM_STEPS),
        (range(40, 100), 55, NUM_STEPS),
        (range(40, 80), 45, NUM_STEPS),
        (range(90, 96), 90, 6),
        (range(10, 10 + NUM_STEPS), 10, NUM_STEPS),
    ],
)
def test_steps_in_the_middle_are_taken(measured, first, count):
    gantt = make_gantt([track_of(0, many(100)), track_of(1, many(100))], measured)
    assert list(gantt.steps) == list(range(first, first + count))


def test_steps_that_some_rank_has_not_recorded_are_none_to_choose():
    gantt = make_gantt([track_of(0, many(100)), track_of(1, many(60))], range(20, 100))
    assert list(gantt.steps) == list(range(25, 25 + NUM_STEPS))  # of 20 to 59
    with pytest.raises(UserError, match="exceed the size of the recorder"):
        make_gantt([track_of(0, many(100)), track_of(1, many(60))], range(60, 100))


def test_sizes_are_of_the_steps_that_are_shown():
    slices = step_of(0, 0, 1, 512, 0) + step_of(1, 20, 1, 100, 3) + step_of(2, 40, 1, 7, 7) + step_of(3, 60, 1, 9, 9)
    gantt = make_gantt([track_of(0, slices + step_of(4, 80, 1, 1, 1))], range(1, 4))
    assert gantt.num_tokens == {"decode": (7, 9), "mixed": (100, 100)}


# What of a benchmark is shown.


@pytest.fixture(scope="module")
def llm():
    from labinfer import LLM

    with LLM("demo", max_model_len=128, num_kv_blocks=64, log_level="warning", threads=1) as llm:
        yield llm


OPTIONS = BenchOptions(input_len=20, output_len=6)


def test_of_latency_the_first_batch_that_counts_is_shown_from_its_beginning(llm):
    from labinfer.cli.bench.latency import LatencyBenchmark

    before = llm.engine.scheduler.next_step_id
    benchmark = LatencyBenchmark(OPTIONS, LatencyOptions(batch_size=3, num_iters_warmup=2, num_iters=2))
    benchmark.prepare(llm)
    figures = benchmark.run(llm, lambda: None)
    assert figures.steps == range(before + 12, before + 18)  # a step of prompts and five more, after two such batches


def test_of_throughput_and_serving_all_that_counts_may_be_shown(llm):
    from labinfer.cli.bench.options import ServeOptions
    from labinfer.cli.bench.serve import ServeBenchmark
    from labinfer.cli.bench.throughput import ThroughputBenchmark

    load = LoadOptions(num_prompts=2, num_warmups=3)
    for benchmark in (ThroughputBenchmark(OPTIONS, load), ServeBenchmark(OPTIONS, load, ServeOptions())):
        before = llm.engine.scheduler.next_step_id
        benchmark.prepare(llm)
        figures = benchmark.run(llm, lambda: None)
        assert figures.steps == range(before + 6, before + 12)


# The picture.

SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml"}


def example() -> Gantt:
    """Two stages; the name of everything that can be in a chart."""
    rows = [
        Row(
            rank=rank,
            stage=rank,
            tp_rank=0,
            bars=[Bar(0, 40, 4, "prefill", 9), Bar(40, 70, 5, "mixed", 9), Bar(80, 90, 6, "decode", 1)],
            waits=waits,
            busy=0.8,
        )
        for rank, waits in ((0, [(70, 80)]), (1, []))
    ]  # fmt: skip
    return Gantt([4, 5, 6], 100, rows, {"prefill": (9, 9), "decode": (1, 1), "mixed": (9, 12)})


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_end_of_the_name_says_what_kind_of_picture_it_is(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"chart.{suffix}"
    draw_gantt(str(path), example(), "a $title with_dollars$")
    assert path.read_bytes().startswith(SIGNATURES[suffix])


def test_each_kind_has_its_colour_where_its_bars_are(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "chart.png"
    draw_gantt(str(path), example(), "title")
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == 2100
    middles = []
    for colour in ((0xE6, 0x9F, 0x00), (0xF0, 0xE4, 0x42), (0x56, 0xB4, 0xE9)):
        columns = (abs(pixels[: pixels.shape[0] // 2] - colour).sum(axis=2) < 6).any(axis=0).nonzero()[0]
        middles.append(columns.mean())
    assert middles == sorted(middles)  # prefill, then mixed, then decode
    greys = pixels.sum(axis=2)
    assert (greys == 3 * 255).mean() > 0.5  # the rest is paper


@pytest.mark.parametrize(("width", "has_outline"), [(10, False), (1000, True)])
def test_bar_that_is_thinner_than_its_outline_has_none(width, has_outline, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "chart.png"
    rows = [
        Row(rank=0, stage=0, tp_rank=0, bars=[Bar(5_000, 5_000 + width, 4, "decode", 1)], waits=[], busy=width / 10_000)
    ]
    draw_gantt(str(path), Gantt([4], 10_000, rows, {"decode": (1, 1)}), "title")
    pixels = image.imread(path)[100:220, 900:1300, :3]  # some of the only row, which is 100 high
    assert ((pixels.sum(axis=2) < 1.5).sum(axis=0) > 60).any() == has_outline


def test_picture_that_cannot_be_written_is_an_error(tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    with pytest.raises(UserError, match="cannot write --plot .*missing/x.png: No such file"):
        save_plot(str(tmp_path / "missing" / "x.png"), figure.Figure())


def test_no_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="--plot needs matplotlib"):
        check_plot(str(tmp_path / "x.png"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x.gif", "png", "-", "x.png.txt"])
def test_only_kinds_that_are_known_are_drawn(name, tmp_path):
    with pytest.raises(UserError, match="the file name must end in .png, .pdf, .svg"):
        check_plot(str(tmp_path / name))


def test_files_that_cannot_be_the_plot_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="cannot write --plot .*directory .* does not exist"):
        check_plot(str(tmp_path / "missing" / "x.png"))
    (tmp_path / "x.svg").touch()
    with pytest.raises(UserError, match="is the --trace file"):
        check_plot(str(tmp_path / "x.svg"), {"--trace": str(tmp_path / "x.svg"), "--output-json": ""})
    check_plot(str(tmp_path / "X.PDF"), {"--trace": "", "--output-json": str(tmp_path / "x.json")})
