"""Commands after a death: an mpirun that is a shell script asks hosts that are there, away, or slow to answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from labinfer.base.clock import SystemClock
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.server.supervisor.elastic_restart import ElasticRestart
from labinfer.server.supervisor.launch_command import LaunchCommand

MPIRUN = """#!/bin/sh
[ -e DIRECTORY/$2.away ] && exec sleep 60
[ -e DIRECTORY/$2.refuses ] && exit 1
LABINFER_NODE_NAME=node-$2 exec sh -c "$7"
"""


class Machines:
    """Hosts a, b and c, with a rank on each."""

    def __init__(self, directory: Path, timeout: float):
        self._directory = directory
        launcher = directory / "mpirun"
        launcher.write_text(MPIRUN.replace("DIRECTORY", str(directory)))
        launcher.chmod(0o755)
        self.words = [str(launcher), "-hosts", "a,b,c", "-n", "3", "python", "launch.py", "serve"]
        self.nodes, self.signum = ["node-a", "node-b", "node-c"], 0
        self._restart = ElasticRestart(
            LaunchCommand(self.words, 6, directory),
            self.words,
            EngineOptions(),
            read_nodes=lambda: self.nodes,
            timeout=timeout,
            signum=lambda: self.signum,
            clock=SystemClock(),
        )

    def mark(self, host: str, state: str) -> Path:
        path = self._directory / f"{host}.{state}"
        path.touch()
        return path

    def next_command(self) -> str:
        return " ".join(self._restart.next_command()[1:])


ALL = "-hosts a,b,c -n 3 python launch.py serve"
WITHOUT_B = "-hosts a,c -n 2 python launch.py serve -tp 1,1 -pp 2"


def test_host_that_stays_away_is_left_out_and_taken_in_again_later(tmp_path, caplog):
    machines = Machines(tmp_path, timeout=0.5)
    assert machines.next_command() == ALL
    mark = machines.mark("b", "refuses")
    assert machines.next_command() == WITHOUT_B
    assert "no answer from b; waiting up to 0.5 s" in caplog.text
    assert "restarting without b: 2 of 3 ranks, with -tp 1,1 -pp 2" in caplog.text
    machines.nodes = ["node-a", "node-c"]  # as the smaller group says
    caplog.clear()
    assert machines.next_command() == WITHOUT_B  # without waiting again
    assert "no answer" not in caplog.text
    mark.unlink()
    assert machines.next_command() == ALL
    assert "b answers again and rejoins the group" in caplog.text


def test_host_that_comes_back_in_time_is_waited_for(tmp_path, caplog):
    machines = Machines(tmp_path, timeout=20)
    mark = machines.mark("c", "refuses")
    threading.Timer(0.8, mark.unlink).start()
    assert machines.next_command() == ALL
    assert "c answers again after" in caplog.text


def test_host_that_does_not_even_refuse_takes_no_longer(tmp_path, monkeypatch):
    monkeypatch.setattr("labinfer.server.supervisor.elastic_restart.ANSWER_SECONDS", 0.5)
    machines = Machines(tmp_path, timeout=0)
    machines.mark("b", "away")
    assert machines.next_command() == WITHOUT_B


def test_signal_ends_the_wait(tmp_path):
    machines = Machines(tmp_path, timeout=60)
    machines.mark("b", "refuses")
    threading.Timer(0.3, setattr, (machines, "signum", 15)).start()
    assert machines.next_command() == ALL


def test_group_without_its_first_host_says_why_it_cannot_go_on(tmp_path):
    machines = Machines(tmp_path, timeout=0)
    machines.mark("a", "refuses")
    with pytest.raises(UserError, match="cannot restart without a: rank 0, which schedules, was on node-a"):
        machines.next_command()
    other = Machines(tmp_path, timeout=0)
    other.nodes = []
    with pytest.raises(UserError, match="no answer from a, and the ranks never connected"):
        other.next_command()


def test_host_without_ranks_is_not_waited_for(tmp_path, caplog):
    machines = Machines(tmp_path, timeout=60)
    machines.nodes = ["node-a", "node-b", "node-b"]
    machines.mark("c", "refuses")
    assert machines.next_command() == ALL
    assert not caplog.text
