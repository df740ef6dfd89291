"""Serving on two ranks under real launchers: how it ends, how it fails, several models, and figures of all ranks.

What holds whatever the launcher is tried under one of them here, and under both in the slow matrix.
"""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from launchers import LAUNCH, Finished, matrix, run
from serving import Server, serving, wait_for
from several_models import check_both_at_once

FLAGS = ("-pp", "2", "--dtype", "float32", "--num-kv-blocks", "512")
FAULTY = "tests/cluster/faulty_launch.py"
END_SECONDS = 12.0


def pair(launcher: str, *flags: str, **options):
    return serving(*FLAGS, *flags, launcher=launcher, ranks=2, **options)


def check_account(server: Server, expected: str) -> None:
    """One line of ours says why it ended."""
    errors = [line for line in server.lines if line.startswith("labinfer: ") and expected in line]
    assert len(errors) == 1, server.text
    assert "Traceback" not in server.own_text, server.text


# The end.


@pytest.mark.parametrize(
    ("launcher", "signum"), matrix(("torchrun", signal.SIGTERM), over=[(signal.SIGINT,), (signal.SIGTERM,)])
)
def test_open_requests_come_to_their_ends_and_everything_is_gone(launcher, signum):
    with pair(launcher) as server:
        check_drain(server, launcher, signum)


def check_drain(server: Server, launcher: str, signum: int) -> None:
    """At a signal open requests come to their ends, new ones are refused, and then everything is gone."""
    tree = server.processes
    streams = [server.stream({"max_tokens": 300}).wait_begun() for _ in range(3)]
    if signum == signal.SIGINT:
        os.killpg(server.process.pid, signum)  # as a terminal does
    else:
        server.process.send_signal(signum)
    wait_for(lambda: server.get("/ready")[0] == 503, 5)
    reply = server.complete()
    reply.check_error(503, "server_error", "draining")
    reply.check_retry_after(20)
    status = server.wait_end(tree, 30)
    for stream in streams:
        stream.finish(1)
        assert (stream.finish_reason, stream.was_cut, stream.error) == ("length", False, None)
    assert status == (1 if launcher == "torchrun" else 128 + signum)  # torchrun has no other for a failure


@pytest.mark.parametrize(("launcher",), matrix())
def test_past_the_drain_timeout_streams_end_with_an_error(launcher):
    with pair(launcher, "--drain-timeout", "1") as server:
        tree = server.processes
        stream = server.stream({"n": 16, "max_tokens": 1900}).wait_begun()
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end(tree) != 0
        assert time.monotonic() - begin < 8
        assert stream.finish(1).error["code"] == "draining"


@pytest.mark.parametrize(("launcher",), matrix())
def test_second_signal_ends_it_at_once(launcher):
    with pair(launcher) as server:
        tree = server.processes
        stream = server.stream({"n": 16, "max_tokens": 1900}).wait_begun()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert server.process.poll() is None
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end(tree) != 0
        assert time.monotonic() - begin < 5
        stream.finish(1)
        assert stream.was_cut or stream.error


@pytest.mark.parametrize(("launcher",), matrix())
def test_with_nothing_open_it_ends_soon(launcher):
    with pair(launcher) as server:
        tree = server.processes
        assert server.complete().status == 200
        time.sleep(0.5)
        begin = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait_end(tree) != 0
        assert time.monotonic() - begin < 4
        assert "labinfer: error" not in server.text


# Failures.

VICTIMS = [("follower",), ("rank 0",), ("gateway",)]


@pytest.mark.parametrize(("launcher", "victim"), matrix(("mpirun", "follower"), over=VICTIMS))
def test_when_one_process_is_killed_all_end_and_no_client_hangs(launcher, victim):
    with pair(launcher) as server:
        check_death(server, victim)
        if victim == "gateway":
            check_account(server, "the gateway process was killed by SIGKILL; shutting down")


def check_death(server: Server, victim: str) -> None:
    """When one process is killed, all others end, and no client hangs."""
    tree = server.processes
    streams = [server.stream({"max_tokens": 1900}).wait_begun() for _ in range(2)]
    pid = server.gateway_pid if victim == "gateway" else server.rank_pid(int(victim == "follower"))
    os.kill(pid, signal.SIGKILL)
    assert server.wait_end(tree, END_SECONDS) != 0
    for stream in streams:
        stream.finish(2)
        assert stream.was_cut or stream.error, stream.lines[-3:]
        assert stream.finish_reason is None


@pytest.mark.parametrize(("launcher",), matrix())
def test_when_the_launcher_is_killed_all_end(launcher):
    with pair(launcher, "--drain-timeout", "1") as server:
        tree, stream = server.processes, server.stream({"max_tokens": 1900}).wait_begun()
        server.process.kill()
        server.wait_end(tree, END_SECONDS)
        assert stream.finish(2).was_cut or stream.error
        if launcher == "torchrun":  # mpirun's daemon kills the ranks before they can say anything
            check_account(server, f"process {server.process.pid}, which started the ranks, is gone; aborting")


@pytest.mark.parametrize(("launcher", "rank"), matrix(("torchrun", 1), over=[(0,), (1,)]))
def test_exception_in_a_rank_ends_all_with_its_traceback(launcher, rank):
    fault = {"FAULT": "raise", "FAULT_RANK": str(rank), "FAULT_STEP": "20"}
    with pair(launcher, script=FAULTY, **fault) as server:
        tree = server.processes
        stream = server.stream({"max_tokens": 1900})
        assert server.wait_end(tree, END_SECONDS) != 0
        stream.finish(2)
        assert stream.was_cut or stream.error["code"] == "engine_failed"
        assert server.text.count("RuntimeError: a fault put in by a test") == 1, server.text


@pytest.mark.parametrize(("launcher",), matrix())
def test_rank_that_hangs_is_named(launcher):
    fault = {"FAULT": "hang", "FAULT_RANK": "1", "FAULT_STEP": "20"}
    with pair(launcher, "--timeout", "2", script=FAULTY, **fault) as server:
        tree = server.processes
        stream = server.stream({"max_tokens": 1900})
        assert server.wait_end(tree, END_SECONDS) != 0
        stream.finish(2)
        assert stream.was_cut or stream.error["code"] == "engine_failed"
        assert "rank 0 (stage 0, tp 0) waited 2 s" in server.text


# The start.


WRONG = [
    (("--model", "no-such-model"), "no-such-model"),
    (("--port", "TAKEN"), "Address already in use"),
    (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    (("--api-key-file", "/no/such/file"), "cannot read --api-key-file /no/such/file"),
    (("--model", "a=demo", "--model", "a=demo-draft"), "the name a is already in use"),
    (("--port", "70000"), "--port must be at most 65535"),
]


def check_refusal(done: Finished, expected: str) -> None:
    (line,) = done.our_errors
    assert expected in line
    assert "Traceback" not in done.own_stderr and "KV cache" not in done.text


def test_what_is_wrong_is_said_in_one_line_on_all_ranks(launches):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, expected in WRONG:
            done = launches.run("mpirun", 2, "serve", *FLAGS, *(flag.replace("TAKEN", port) for flag in flags))
            assert done.returncode == 2, done.text
            check_refusal(done, expected)


@pytest.mark.parametrize(("launcher", "flags", "expected"), matrix(over=WRONG))
def test_what_is_wrong_is_said_in_one_line(launcher, flags, expected):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = [flag.replace("TAKEN", port) for flag in flags]
        done = run(launcher, 2, LAUNCH, "serve", *FLAGS, *flags, timeout=60)
    assert done.returncode == (1 if launcher == "torchrun" else 2), done.text
    check_refusal(done, expected)


# Several models, and figures.


@pytest.mark.parametrize(
    ("launcher", "parallel"), matrix(("mpirun", "-pp"), ("torchrun", "-tp"), over=[("-pp",), ("-tp",)])
)
def test_two_models_on_two_ranks_answer_as_they_would_alone_until_a_signal(launcher, parallel):
    models = ("--model", "a=demo", "--model", "b=demo-draft")
    with serving(parallel, "2", *FLAGS[2:], *models, launcher=launcher, ranks=2) as server:
        check_both_at_once(server)
        server.complete(model="demo").check_error(404, "invalid_request_error", "model_not_found")
        assert server.text.count("rank  device") == 1
        check_drain(server, launcher, signal.SIGINT)


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_figures_of_all_ranks_appear_soon_and_rest_afterwards_until_rank_0_is_killed(launcher):
    with pair(launcher) as server:
        stream = server.stream({"n": 4, "max_tokens": 1900}).wait_begun()
        names = ("labinfer:stage_busy_seconds_total", "labinfer:rank_steps_total", "labinfer:rank_peak_memory_bytes")

        def moved() -> bool:
            of_ranks = [server.metrics(name, rank=str(rank)) for name in names for rank in (0, 1)]
            sent = [server.metrics("labinfer:link_bytes_total", source=str(rank)) for rank in (0, 1)]
            return all(sum(values) > 0 for values in of_ranks + sent)

        wait_for(moved, 2.5)
        assert server.metric("vllm:num_requests_running") == 4
        assert server.metric("labinfer:step_age_seconds") < 2
        steps = [server.metric("labinfer:rank_steps_total", rank=str(rank)) for rank in (0, 1)]
        wait_for(lambda: server.metric("labinfer:rank_steps_total", rank="1") > steps[1], 2.5)
        stream.hang_up()
        server.wait_idle(2)
        time.sleep(1.5)  # the other ranks' last word
        at_rest = [server.metrics(name) for name in names]
        counts = [server.metric("labinfer:rank_steps_total", rank=str(rank)) for rank in (0, 1)]
        assert abs(counts[0] - counts[1]) <= 1
        time.sleep(1.2)
        assert [server.metrics(name) for name in names] == at_rest
        assert server.metric("labinfer:step_age_seconds") == 0
        assert server.metric("vllm:generation_tokens_total") > 100
        check_death(server, "rank 0")
