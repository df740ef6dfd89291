"""``supervise`` without ``--``, and with it in the wrong place."""

from __future__ import annotations

import pytest

from labinfer.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("mpirun -n 2 python launch.py serve", "-- mpirun -n 2 python launch.py serve"),
        ("--max-restarts 3 python launch.py serve", "--max-restarts 3 -- python launch.py serve"),
        ("python launch.py serve -- x", "-- python launch.py serve -- x"),
        ("launch.py serve", "-- launch.py serve"),
    ],
)
def test_command_line_is_told_with_the_separator(arguments, right, capfd, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda word: word if word in ("mpirun", "python") else None)
    assert main(["supervise", *arguments.split()]) == 2
    error = capfd.readouterr().err
    assert error == f"labinfer: error: supervise needs -- before the command to start: launch.py supervise {right}\n"
