"""How a supervisor takes the ends of its group, which is a shell here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from fake_clock import FakeClock

from labinfer.comm.spmd.environment import SupervisorAddress
from labinfer.server.gateway import main
from labinfer.server.supervisor.restarts import Restarts
from labinfer.server.supervisor.supervisor import Supervisor


def run(directory: Path, script: str) -> tuple[int, int]:
    """Exit status, and starts of the group."""
    command = ["sh", "-c", f"echo >> starts; {script}"]
    supervisor = Supervisor(
        command,
        lambda: command,
        directory=directory,
        environment=dict(os.environ),
        restarts=Restarts(3),
        signum=lambda: 0,
        gateway=None,
        clock=FakeClock(),
    )
    return supervisor.run(), len((directory / "starts").read_text())


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_launcher_that_ends_alike_before_its_ranks_have_met_is_started_three_times(here, caplog):
    assert run(here, "exit 3") == (70, 3)
    assert "exited 3 times with status 3 before its ranks connected" in caplog.text


def test_group_that_ends_otherwise_each_time_is_started_again(here):
    assert run(here, "exit $(wc -l < starts)") == (70, 4)


def test_group_whose_ranks_have_met_is_started_as_often_as_may_be(here, caplog):
    SupervisorAddress(str(here), "", 0).write_nodes(["host"])
    assert run(here, "exit 3") == (70, 4)
    assert "; not restarting" in caplog.text


def test_group_that_refuses_is_not_started_again(here, caplog):
    assert run(here, "printf 2 > status; exit 1") == (2, 1)
    assert "rejected their options or input" in caplog.text


def test_gateway_whose_supervisor_is_gone_ends(monkeypatch):
    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with pytest.raises(Ended, match="70"):
        asyncio.run(main._beat(write_end, 0.01))
    os.close(write_end)
