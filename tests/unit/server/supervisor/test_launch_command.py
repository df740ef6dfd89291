"""Hosts in the command lines of mpiruns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labinfer.cli.main import main
from labinfer.server.supervisor.launch_command import PRINT_NODE_NAME, LaunchCommand

PROGRAM = ["numactl", "-l", "/opt/bin/python3", "-u", "launch.py", "serve", "-n", "7"]


def read(text: str, directory: Path) -> LaunchCommand:
    words = [*text.split(), *PROGRAM]
    return LaunchCommand(words, words.index("launch.py"), directory)


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        ("mpirun -hosts a,b,c -ppn 1 -n 3", "mpirun -hosts a,c -ppn 1 -n 2", "mpirun -hosts c -ppn 1 -n 1"),
        ("/opt/mpiexec --host=a:2,b:2,c -np 5", "/opt/mpiexec --host=a:2,c -np 2", "/opt/mpiexec --host=c -np 1"),
        ("mpirun -H a -H b,c --bind-to none", "mpirun -H a -H c --bind-to none", "mpirun -H c -H c --bind-to none"),
    ],
)
def test_hosts_that_are_left_are_the_launchers_only_ones(before, after, asked, tmp_path):
    command = read(before, tmp_path)
    assert command.hosts == ("a", "b", "c")
    assert command.start(["c", "a"], 2) == after.split() + PROGRAM
    assert command.print_node_name("c") == [*asked.split(" "), "numactl", "-l", "sh", "-c", PRINT_NODE_NAME]


def test_host_file_is_written_anew(tmp_path):
    given = tmp_path / "given"
    given.write_text("# ours\na slots=2\nb:2\n\nc  slots=1 # slow\n")
    command = read(f"mpirun --hostfile {given} -n 5", tmp_path)
    assert command.hosts == ("a", "b", "c")
    words = command.start(["a", "c"], 3)
    assert Path(words[2]).read_text() == "a slots=2\nc  slots=1\n"
    assert words[3:5] == ["-n", "3"]
    assert "a slots=2" in given.read_text()


@pytest.mark.parametrize(
    "launcher",
    ["mpirun -n 3", "torchrun --nnodes 3", "srun -w a,b", "mpirun -hosts a,b -n 1 x : -n 1", "mpirun -f /none"],
)
def test_launcher_whose_hosts_are_not_known_has_none(launcher, tmp_path):
    assert read(launcher, tmp_path).hosts == ()


def test_restart_takes_what_the_first_start_has_measured(monkeypatch):
    given: list[list[str]] = []
    monkeypatch.setattr("labinfer.cli.commands.supervise.run", lambda *_, again, **__: given.append(again) or 0)
    command = [sys.executable, "launch.py", "serve", "--port", "0"]
    for flags in ([], ["--autotune", "again"], ["--autotune", "off"]):
        assert main(["supervise", "--", *command, *flags]) == 0
    restarts = [[], ["--autotune", "again", "--autotune", "on"], ["--autotune", "off"]]
    assert given == [[*command, *flags] for flags in restarts]
