"""Processes that are stopped: within the fault timeout they are named, all end, and nothing is left."""

from __future__ import annotations

import os
import signal
import time

import pytest
from launchers import LAUNCH, LAUNCHERS, command, descendants, error_lines, finish, matrix, run, start
from serving import is_running, rank_number, serving, wait_for

FAULTY = "tests/cluster/faulty_launch.py"
TIMEOUT = 4.0
FLAGS = ("--fault-timeout", f"{TIMEOUT:g}")
END_SECONDS = 6.0
"""From the moment at which a process is named to the end of all, launchers included."""
NAMES = {0: "rank 0", 1: "rank 1", None: "the gateway process"}


@pytest.mark.parametrize(
    ("launcher", "stopped", "busy"),
    matrix(("mpirun", 0, True), over=[(rank, busy) for rank in NAMES for busy in (True, False)]),
)
def test_stopped_process_of_a_server_is_named(launcher, stopped, busy):
    with serving("-pp", "2", "--no-autotune", *FLAGS, launcher=launcher, ranks=2) as server:
        assert server.get("/health") == (200, {"status": "idle"})
        stream = server.stream({}).wait_begun() if busy else None
        if busy:
            assert server.get("/health")[1]["status"] == "ok"
        tree, pid = server.processes, server.gateway_pid if stopped is None else server.rank_pid(stopped)
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        if stopped == 0:
            wait_for(lambda: server.get("/health")[0] == 503, TIMEOUT)
            status, health = server.get("/health")
            assert health["status"] == "stalled" and health["wait"]["seconds"] >= TIMEOUT / 4
            assert (health["wait"]["rank"], health["wait"]["peers"], health["wait"]["step"]) == (None, "0", None)
            assert server.get("/ready")[0] == 503
        assert server.wait_end(tree, TIMEOUT + 1 + END_SECONDS) != 0
        print(f"{launcher}: {NAMES[stopped]} stopped, all ended after {time.monotonic() - begin:.1f} s")
        errors = [line for line in server.own_text.splitlines() if "no heartbeat from" in line]
        assert len(errors) == 1 and NAMES[stopped] in errors[0], server.text
        if stopped is not None:
            assert "last state: rank" in errors[0] and "step" in errors[0]
        if stream is not None and stopped is not None:
            assert stream.finish().was_cut or stream.error


STUCK = """
import signal, time
signal.signal(signal.SIGUSR1, lambda signum, frame: time.sleep(3600))
"""
"""Handlers run in the main thread, which is that of the gateway's loop."""


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGUSR1])
def test_gateway_of_a_supervisor_that_does_not_get_on_is_replaced(signum, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with serving("--no-autotune", *FLAGS, supervised=True, PYTHONPATH=path) as server:
        gateway = server.gateway_pid
        os.kill(gateway, signum)
        wait_for(lambda: not is_running(gateway), TIMEOUT + END_SECONDS)
        assert "error: no heartbeat from the gateway process" in server.text
        wait_for(lambda: server.text.count("serving ") == 2, 60)
        wait_for(lambda: server.complete().status == 200, 10)
        assert "(restart 2)" not in server.text
        tree = server.processes
        assert server.stop() == 128 + signal.SIGTERM
        wait_for(lambda: not any(map(is_running, tree)), 10)


@pytest.mark.slow
def test_server_whose_launcher_is_stopped_goes_on_though_nobody_reads_its_log():
    with serving("-pp", "2", "--no-autotune", *FLAGS, launcher="mpirun", ranks=2) as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        until = time.monotonic() + 3 * TIMEOUT
        while time.monotonic() < until:
            assert server.complete(max_tokens=1).status == 200
        os.kill(server.process.pid, signal.SIGCONT)
        assert server.stop() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_server_that_was_stopped_as_a_whole_goes_on():
    with serving("-pp", "2", "--no-autotune", *FLAGS, launcher="mpirun", ranks=2) as server:
        stream = server.stream({"max_tokens": 400}).wait_begun()
        tree = server.processes
        for signum, seconds in ((signal.SIGSTOP, 2 * TIMEOUT), (signal.SIGCONT, TIMEOUT)):
            for pid in tree:
                os.kill(pid, signum)
            time.sleep(seconds)
        assert stream.finish(90).finish_reason == "length"
        assert "no heartbeat from" not in server.text


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "rank"), matrix(over=[(0,), (1,)]))
def test_rank_that_stops_before_the_others_have_met_it_is_named(launcher, rank, model):
    process = start(command(launcher, 2, LAUNCH, "--model", model, "--prompt", "x", "-pp", "2", "--timeout", "4"))
    wait_for(lambda: any(rank_number(pid) == rank for pid in descendants(process.pid)), 20)
    pid = next(pid for pid in descendants(process.pid) if rank_number(pid) == rank)
    os.kill(pid, signal.SIGSTOP)
    done = finish(process, 25)  # torchrun alone waits 30 s for a worker that is stopped
    assert done.returncode != 0
    assert f"stopped: process {pid}" in done.our_errors[0]
    wait_for(lambda: not is_running(pid), 5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_that_stops_before_the_ranks_have_met_is_named(launcher, model, tmp_path):
    """Ranks meet in torchrun's store, or by way of mpirun's daemon.

    They write to a file: mpirun, once it goes on, first answers a daemon that has ended, and dies of SIGPIPE before it has
    read what that one had passed on.
    """
    flags = ("--model", model, "--prompt", "x", "-pp", "2", "--timeout", "4")
    log = tmp_path / "stderr"
    arguments = command(launcher, 2, LAUNCH, *flags)
    if launcher == "mpirun":
        arguments[3:3] = ["sh", "-c", 'exec "$0" "$@" 2>> "$LOG"']
    process = start(arguments, LOG=str(log))
    wait_for(lambda: sum(rank_number(pid) >= 0 for pid in descendants(process.pid)) >= 2, 20)
    ranks = [pid for pid in descendants(process.pid) if rank_number(pid) >= 0]
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: not any(map(is_running, ranks)), 30)
    os.kill(process.pid, signal.SIGCONT)
    done = finish(process, 25)
    assert done.returncode != 0
    errors = error_lines(log.read_text()) if launcher == "mpirun" else done.our_errors
    assert f"stopped: process {process.pid}" in errors[0]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_that_stops_after_its_goodbye_is_ended(rank, model):
    flags = ("--model", model, "--prompt", "x", "--max-tokens", "2", "-pp", "2", "--fault-timeout", "2")
    done = run("mpirun", 2, FAULTY, *flags, timeout=40, FAULT="leave", FAULT_RANK=str(rank))
    assert done.returncode != 0
    assert f"rank {1 - rank} on " in done.our_errors[0] and "waited 2 s (--fault-timeout)" in done.our_errors[0]
    assert done.stdout.strip()
