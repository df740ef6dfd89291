"""Energy in real launches: from a make-believe powercap tree, and of a host without one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from launchers import run
from powercap_tree import make_zone, set_joules

SCRIPT = "tests/cluster/energy_launch.py"
BENCH = ("bench", "throughput", "--num-prompts", "4", "--output-len", "60", "--num-warmups", "0")


@contextmanager
def growing_zone(root) -> Iterator[Callable[[], float]]:
    """A package that uses 1 J every millisecond. Yields the joules so far."""
    zone, used, ended = make_zone(root, "intel-rapl:0", "package-0", 0.0, whole=1e6), [0], threading.Event()

    def use() -> None:
        while not ended.wait(0.001):
            used[0] += 1
            set_joules(zone, used[0])

    thread = threading.Thread(target=use)
    thread.start()
    try:
        yield lambda: float(used[0])
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("launcher", "nodes"),
    [
        ("mpirun", ()),
        pytest.param("mpirun", ("a", "b"), marks=pytest.mark.slow),
        pytest.param("torchrun", (), marks=pytest.mark.slow),
    ],
)
def test_energy_of_a_run_is_that_of_its_hosts(launcher, nodes, tmp_path):
    file = tmp_path / "figures.json"
    with growing_zone(tmp_path / "tree") as used:
        done = run(
            launcher,
            2,
            SCRIPT,
            *BENCH,
            "-pp",
            "2",
            "--output-json",
            file,
            nodes=nodes,
            POWERCAP_TREE=str(tmp_path / "tree"),
        )
        assert done.returncode == 0, done.text
        energy = json.loads(file.read_text())["energy"]
        assert {rank: [*counters] for rank, counters in energy["ranks"].items()} == {
            str(rank): ["package-0"] for rank in range(len(nodes) or 1)
        }
        assert all(0 < joules["package-0"] < used() for joules in energy["ranks"].values())
    total = sum(joules["package-0"] for joules in energy["ranks"].values())
    assert energy["joules"] == pytest.approx(total) and energy["not_measured"] == []
    assert energy["joules_per_request"] == pytest.approx(total / 4, rel=1e-3)
    assert energy["joules_per_output_token"] == pytest.approx(total / 240, rel=1e-3)
    assert re.search(r"^energy: [\d.]+ J, [\d.]+ J per output token", done.stdout, re.M), done.text


def test_host_without_counters_says_so_in_one_line(tmp_path):
    file, missing = tmp_path / "figures.json", tmp_path / "none"
    done = run("single", 1, SCRIPT, *BENCH, "--output-json", file, POWERCAP_TREE=str(missing))
    assert done.returncode == 0, done.text
    assert done.stdout.splitlines()[-1] == f"energy: not measured (rank 0: no CPU package in {missing})"
    assert json.loads(file.read_text())["energy"]["joules"] is None
