"""Tables, percentiles and the progress line."""

from __future__ import annotations

import io
import os
import re
import time

import pytest

from labinfer.base.rank_stats import WorkerStats
from labinfer.observe import line_writer, progress_line
from labinfer.observe.line_writer import LineWriter
from labinfer.observe.progress_line import ProgressLine, Ticker, TransferLine, compile_progress
from labinfer.observe.report import RunReport, describe_loads
from labinfer.observe.table import format_bytes, format_table, percentile


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([1, 2], 0.5, 1), (range(1, 11), 0.9, 9), (range(1, 11), 0.99, 10), ([3, 1, 2], 0.5, 2), ([7], 0.01, 7)],
)
def test_percentile_is_the_nearest_rank(values, fraction, expected):
    assert percentile(list(values), fraction) == expected


def test_tables_align_chinese_by_its_width():
    lines = format_table(("name", "n"), [("你好", 5), ("abcdef", 12)]).splitlines()
    assert lines[2] == "你好     5"
    assert lines[3] == "abcdef  12"


def test_columns_that_do_not_fit_follow_below_with_the_first_one():
    header, rows = ("rank", "layers", "weights"), [(0, "0-3", "2.1 MiB"), (1, "4-5", "2.6 MiB")]
    assert format_table(header, rows, 21) == format_table(header, rows) and format_table(header, rows, 20).split(
        "\n"
    ) == [
        *("rank  layers", "----  ------", "   0  0-3", "   1  4-5", ""),
        *("rank  weights", "----  -------", "   0  2.1 MiB", "   1  2.6 MiB"),
    ]


def test_only_the_text_of_a_column_wider_than_the_terminal_is_wider():
    lines = format_table(("rank", "waits"), [(0, "x" * 30)], 20).splitlines()
    assert lines == ["rank  waits", "----  " + "-" * 14, "   0  " + "x" * 30]


def test_lines_that_nobody_reads_hold_up_nobody_and_come_when_somebody_does(monkeypatch):
    monkeypatch.setattr(line_writer, "CLOSE_SECONDS", 0.05)
    read_end, write_end = os.pipe()
    writer, num_lines = LineWriter(write_end), line_writer.MAX_LINES + 5000
    for number in range(num_lines):
        writer.write(f"{number:0100d}\n")
    writer.close()
    text = ""
    while not (lost := re.search(r"labinfer: (\d+) log lines were dropped", text)):
        text += os.read(read_end, 1 << 20).decode()
    written = [int(line) for line in text.splitlines()[:-1]]
    assert written == sorted({*written}) and len(written) + int(lost[1]) == num_lines
    os.close(read_end)
    os.close(write_end)


def test_bytes_are_given_in_the_unit_that_fits():
    assert [format_bytes(n) for n in (12, 1536, 3 << 20, 5 << 40)] == ["12 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"]


def test_bubble_is_the_time_a_rank_did_not_compute():
    worker = WorkerStats(
        rank=0,
        stage=0,
        tp_rank=0,
        num_steps=1,
        busy_time=1.5,
        peak_memory=0,
        private_memory=0,
        weight_bytes_read=0,
        num_threads=1,
        cpus="0",
        waits={"plans": 0.1, "activations": 0.3, "tokens": 0.0004},
    )
    report = RunReport(wall_time=2.0, workers=[worker])
    assert report.bubble(worker) == report.mean_bubble == 0.25
    assert report.as_dict()["bubble"] == [0.25]
    assert max(map(len, report.format().splitlines())) <= 80
    assert report.as_dict()["waits_s"] == [worker.waits]
    assert "activations 15.0 %, plans 5.0 %\n" in report.format() and "accelerators" not in report.format()


def test_accelerators_of_ranks_are_named():
    workers = [
        WorkerStats(
            rank=rank,
            stage=rank,
            tp_rank=0,
            num_steps=1,
            busy_time=1.0,
            peak_memory=0,
            private_memory=0,
            weight_bytes_read=0,
            num_threads=1,
            cpus="0",
            accelerator=name,
        )
        for rank, name in enumerate(["", "npu:0 (Ascend910B)", "npu:1 (Ascend910B)"])
    ]
    report = RunReport(wall_time=2.0, workers=workers)
    assert report.as_dict()["accelerators"] == ["", "npu:0 (Ascend910B)", "npu:1 (Ascend910B)"]
    assert "accelerators           rank 1 npu:0 (Ascend910B), rank 2 npu:1 (Ascend910B)\n" in report.format()


def test_expert_loads_are_told_in_a_line():
    loads = {0: [10, 0, 10, 20], 2: [1, 1, 1, 1], 5: [0, 0, 0, 0]}
    assert describe_loads(loads) == (
        "busiest expert per layer: 1.5 times the mean load, up to 2.0 times (layer 0, expert 3); 5 of 12 experts had no tokens"
    )
    assert describe_loads({0: [0, 0]}) == "no expert was used"


def test_off_a_terminal_progress_is_plain_lines_and_seldom():
    stream = io.StringIO()
    line = ProgressLine(stream)
    assert not line.due()
    line.update("halfway")
    line.close()
    assert stream.getvalue() == "labinfer: halfway\n"


def test_on_a_terminal_progress_is_one_line_written_over():
    stream = io.StringIO()
    stream.isatty = lambda: True
    line = ProgressLine(stream)
    assert line.due()
    line.update("first")
    assert not line.due()
    line.update("2nd")
    line.close()
    assert stream.getvalue() == "\rfirst\r\r2nd  \r\r   \r"


def live_stream(monkeypatch: pytest.MonkeyPatch, columns: list[int]) -> io.StringIO:
    """A terminal whose width is the last of ``columns``."""
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((columns[-1], 24)))
    stream = io.StringIO()
    stream.isatty, stream.fileno = lambda: True, lambda: 2
    return stream


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "importing torch, for the model, 3 s"),
        (36, "importing torch, for the model, 3 s"),  # the last column stays free
        (35, "importing torch, 3 s"),
        (20, "importing tor…, 3 s"),
        (1, ", 3 s"),
    ],
)
def test_progress_fits_the_terminal_and_keeps_its_ending(columns, shown, monkeypatch):
    stream = live_stream(monkeypatch, [columns])
    ProgressLine(stream).update("importing torch, for the model", ", 3 s")
    assert stream.getvalue() == f"\r{shown}\r"


def test_wide_characters_of_progress_count_twice(monkeypatch):
    stream = live_stream(monkeypatch, [12])
    line = ProgressLine(stream)
    line.update("加载模型权重")  # 12 columns: one more than there is room for
    line.update("加载模型权")
    line.close()
    assert stream.getvalue() == "\r加载模型权…\r\r加载模型权 \r\r          \r"


def test_progress_follows_a_terminal_that_is_resized(monkeypatch):
    columns = [80]
    stream = live_stream(monkeypatch, columns)
    line = ProgressLine(stream)
    line.update("x" * 60)
    columns.append(40)
    line.update("y" * 60)
    line.close()
    assert stream.getvalue() == f"\r{'x' * 60}\r\r{'y' * 38}…\r\r{' ' * 39}\r"


def test_compiling_is_said_before_it_begins_and_every_ten_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with compile_progress(stream) as on_progress:
        for seconds in range(0, 25, 5):
            now[0] = 100.0 + seconds
            on_progress(seconds, 99)
    assert stream.getvalue().splitlines() == [
        f"labinfer: compiling C++ kernels for this machine (once): {done} of 99 files, {done} s" for done in (0, 10, 20)
    ]
    with compile_progress(stream := io.StringIO()):
        pass
    assert stream.getvalue() == ""  # nothing had to be compiled


def test_transfer_tells_bytes_rate_and_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    line = TransferLine("loading weights", "; Ctrl-C skips this", stream)
    for seconds in range(11):
        now[0] = 100.0 + seconds
        line.show(seconds << 28, 10 << 28)
    assert stream.getvalue().splitlines() == [
        f"labinfer: loading weights: {done} of 2.5 GiB, 256.0 MiB/s, {left} s left, [{bar:.<10}]; Ctrl-C skips this"
        for done, left, bar in (("512.0 MiB", 8, "##"), ("1.2 GiB", 5, "#####"))
    ]
    TransferLine("loading weights", stream=(stream := live_stream(monkeypatch, [40]))).show(0, 10 << 28)
    assert stream.getvalue() == "\rloading weights: 0 B of 2.5 GiB\r"


def test_ticker_counts_the_seconds_of_what_says_nothing_itself(monkeypatch):
    monkeypatch.setattr(progress_line, "TICK_SECONDS", 0.01)
    stream = io.StringIO()
    Ticker(lambda: "importing", stream, plain_seconds=60).close()
    assert stream.getvalue() == "", "off a terminal, what is fast is done without a word"
    ticker = Ticker(lambda: "importing", stream, plain_seconds=0.02)
    deadline = time.monotonic() + 10
    while "importing, " not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    ticker.describe = lambda: "meeting"
    ticker.close()
    lines = stream.getvalue().splitlines()
    assert lines and all(re.fullmatch(r"labinfer: (importing|meeting), \d+ s", line) for line in lines)


def test_ticker_on_a_terminal_begins_at_once_and_leaves_nothing():
    stream = io.StringIO()
    stream.isatty = lambda: True
    Ticker(lambda: "importing", stream).close()
    assert stream.getvalue() == "\rimporting\r\r         \r"


def test_report_has_a_line_for_those_who_only_want_the_answer():
    report = RunReport(
        num_finished=1,
        prompt_tokens=9,
        output_tokens=8,
        wall_time=0.5,
        time_to_first_token=[0.1],
        time_per_output_token=[],
    )
    assert report.summary() == "8 tokens in 500.0 ms (16.0/s), TTFT 100.0 ms; 9 prompt tokens"
    report.num_finished, report.output_tokens = 2, 1
    assert report.summary().startswith("2 requests: 1 token in 500.0 ms (2.0/s), ")
    report.num_finished, report.prompt_tokens = 1, 1
    assert report.summary().endswith("; 1 prompt token")
    assert RunReport().summary() == "0 tokens in 0.0 ms; 0 prompt tokens"


def test_report_ends_its_totals_with_the_fingerprint_of_a_job():
    report = RunReport(wall_time=2.0)
    assert "fingerprint" not in report.format()
    report.fingerprint = "fp_" + "0" * 32
    assert report.format().splitlines()[-1] == f"fingerprint            {report.fingerprint}"
    assert len(report.format().splitlines()[-1]) <= 80


def test_line_of_which_a_part_is_written_goes_on(monkeypatch):
    read_end, write_end = os.pipe()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    writer = LineWriter(write_end)
    writer.write("a whole line\n")
    writer.close()
    assert os.read(read_end, 100) == b"a whole line\n"
    os.close(read_end)
    os.close(write_end)


def test_plain_lines_of_a_long_start_come_less_often(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    line, shown = ProgressLine(io.StringIO(), plain_seconds=1.5), []
    for _ in range(160):
        if line.due():
            line.update("starting")
            shown.append(now[0] - 100.0)
        now[0] += 0.25
    assert shown == [1.5, 4.5, 10.5, 20.5, 30.5]
