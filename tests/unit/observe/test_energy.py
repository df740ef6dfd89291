"""Energy of packages by a make-believe powercap tree, and the figures of a run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from powercap_tree import make_zone, set_joules

from labinfer.base.rank_stats import WorkerStats
from labinfer.observe.energy_meter import EnergyCounter, EnergyMeter, find_packages
from labinfer.observe.report import RunReport


@pytest.fixture
def server(tmp_path) -> dict[str, Path]:
    """Two sockets whose DRAM is counted, by zone; and the zones that count part of them again."""
    zones = {
        "intel-rapl:0": ("package-0", 900.0),
        "intel-rapl:0:0": ("core", 1.0),
        "intel-rapl:0:1": ("dram", 20.0),
        "intel-rapl:1": ("package-1", 30.0),
        "intel-rapl:1:0": ("uncore", 2.0),
        "intel-rapl:1:1": ("dram", 40.0),
        "intel-rapl:2": ("psys", 3.0),
        "intel-rapl-mmio:0": ("package-0", 4.0),
    }
    (tmp_path / "intel-rapl").mkdir()
    return {zone: make_zone(tmp_path, zone, *described) for zone, described in zones.items()}


def test_packages_and_their_memory_are_counted_once(server, tmp_path):
    counters, missing = find_packages(tmp_path)
    meter = EnergyMeter(counters, missing)
    for number, folder in enumerate(server.values(), 1):
        set_joules(folder, int((folder / "energy_uj").read_text()) / 1e6 + number)
    assert meter.read() == pytest.approx({"package-0": 1, "package-0 dram": 3, "package-1": 4, "package-1 dram": 6})
    assert not meter.missing


def test_zones_with_one_name_are_counted_apart(tmp_path):
    zones = {"intel-rapl:0": ("package-0", 900.0), "intel-rapl:1": ("package-0", 30.0), "intel-rapl:1:0": ("dram", 1.0)}
    zones["intel-rapl:1:1"] = ("dram", 500.0)
    folders = [make_zone(tmp_path, zone, *described) for zone, described in zones.items()]
    meter = EnergyMeter(find_packages(tmp_path)[0])
    for folder, joules in zip(folders, (905.0, 37.0, 3.0, 501.0), strict=True):
        set_joules(folder, joules)
    joules = {"package-0": 5, "package-0 (intel-rapl:1)": 7, "package-0 dram": 2, "package-0 dram (intel-rapl:1:1)": 1}
    assert meter.read() == pytest.approx(joules)


def test_counter_that_wraps_around_goes_on(server, tmp_path):
    meter = EnergyMeter(find_packages(tmp_path)[0])
    set_joules(server["intel-rapl:0"], 50.0)  # from 900, with 1000 in all
    assert meter.read()["package-0"] == pytest.approx(150.0)
    set_joules(server["intel-rapl:0"], 60.0)
    assert meter.read()["package-0"] == pytest.approx(160.0)
    meter.begin()
    set_joules(server["intel-rapl:0"], 59.0)
    assert meter.read()["package-0"] == pytest.approx(999.0)


def test_counter_that_wraps_around_in_a_long_run_is_read_by_a_thread():
    calls = []

    def read() -> float:
        calls.append(60.0 * len(calls) % 100)
        return calls[-1]

    before = set(threading.enumerate())
    meter = EnergyMeter([EnergyCounter(name="p", read=read, range=100.0)], interval=0.001)
    deadline = time.monotonic() + 10
    while len(calls) < 100 and time.monotonic() < deadline:
        time.sleep(0.001)
    num_reads, rest = divmod(meter.read()["p"], 60)
    assert num_reads >= 100 and not rest
    (reader,) = set(threading.enumerate()) - before
    del meter
    reader.join(10)
    assert not reader.is_alive(), "a model that was dropped is still measured"


def test_no_thread_reads_what_never_wraps_around():
    before = set(threading.enumerate())
    EnergyMeter([EnergyCounter(name="cuda:0", read=lambda: 1.0)])
    assert set(threading.enumerate()) <= before


def test_counters_without_permission_are_named_once(server, tmp_path, monkeypatch):
    read_text = Path.read_text

    def refuse(path, *arguments, **named):  # the tests may run as root, whom a mode does not stop
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert find_packages(tmp_path) == ([], [f"needs read permission for {tmp_path}/intel-rapl:*/energy_uj"])


def test_host_without_packages_says_where_they_were_looked_for(tmp_path):
    reason = f"no CPU package in {tmp_path / 'powercap'}"
    assert find_packages(tmp_path / "powercap") == ([], [reason])
    make_zone(tmp_path / "powercap", "intel-rapl:0", "psys", 1.0)
    assert find_packages(tmp_path / "powercap") == ([], [reason])


def test_broken_zone_is_named_and_the_others_count(server, tmp_path):
    (server["intel-rapl:1"] / "max_energy_range_uj").write_text("")
    (server["intel-rapl:1:1"] / "energy_uj").unlink()
    counters, missing = find_packages(tmp_path)
    assert [counter.name for counter in counters] == ["package-0", "package-0 dram"]
    assert [reason.split(": ")[0] for reason in missing] == [str(tmp_path / f"intel-rapl:{z}") for z in ("1", "1:1")]


def test_counter_that_fails_later_is_left_out_with_its_reason():
    values = iter([1.0, 2.0])

    def read() -> float:
        for value in values:
            return value
        raise RuntimeError("GPU is lost\nand more")

    meter = EnergyMeter([EnergyCounter(name="cuda:0", read=read), EnergyCounter(name="p", read=lambda: 5.0)])
    assert meter.read() == {"cuda:0": 1.0, "p": 0.0} and not meter.missing
    for _ in range(2):
        assert meter.read() == {"p": 0.0} and meter.missing == ["cuda:0: GPU is lost"]


def stats(rank: int, energy: dict[str, float], *missing: str) -> WorkerStats:
    return WorkerStats(
        rank=rank,
        stage=0,
        tp_rank=0,
        num_steps=1,
        busy_time=1.0,
        peak_memory=0,
        private_memory=0,
        weight_bytes_read=0,
        num_threads=1,
        cpus="0",
        energy=energy,
        energy_missing=list(missing),
    )


def test_report_has_the_energy_of_a_run_by_rank_token_and_request():
    workers = [stats(0, {"package-0": 90.0, "package-0 dram": 10.0}), stats(1, {"cuda:0": 60.0}), stats(2, {})]
    report = RunReport(wall_time=1.0, output_tokens=64, num_finished=4, workers=workers)
    assert report.as_dict()["energy"] == {
        "joules": 160.0,
        "joules_per_output_token": 2.5,
        "joules_per_request": 40.0,
        "ranks": {"0": {"package-0": 90.0, "package-0 dram": 10.0}, "1": {"cuda:0": 60.0}},
        "not_measured": [],
    }
    line = next(line for line in report.format().splitlines() if line.startswith("energy"))
    assert line.split(None, 1)[1] == (
        "160.0 J, 2.5 J per output token, 40 J per request, rank 0 package-0 90.0 J + package-0 dram 10.0 J, "
        "rank 1 cuda:0 60.0 J"
    )


def test_what_is_not_measured_is_no_zero():
    reason = "no CPU package in /sys/class/powercap"
    report = RunReport(workers=[stats(0, {}, reason), stats(1, {}), stats(2, {}, reason)], output_tokens=3)
    assert report.as_dict()["energy"] == {
        "joules": None,
        "joules_per_output_token": None,
        "joules_per_request": None,
        "ranks": {},
        "not_measured": [f"ranks 0, 2: {reason}"],
    }
    assert f"energy                 not measured (ranks 0, 2: {reason})" in report.format()


def test_part_that_is_not_measured_is_named_beside_the_sum():
    report = RunReport(workers=[stats(0, {"package-0": 8.0}), stats(1, {}, "npu:0: no counter")], num_finished=2)
    assert report.energy().describe() == (
        "8.0 J, 4 J per request, rank 0 package-0 8.0 J, not measured (rank 1: npu:0: no counter)"
    )
    assert "energy " not in RunReport(workers=[stats(0, {})]).format()
