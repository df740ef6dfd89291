"""Start and end, several models and figures: the server as its operator meets it, on one rank."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import is_running, serving, wait_for
from several_models import check_both_at_once
from waiting_ranks import run_in_turn

import labinfer

SMALL = ("--dtype", "float32", "--num-kv-blocks", "512")

# The end.


class TestEnd:
    def test_at_a_signal_open_requests_come_to_their_ends_and_new_ones_are_refused(self):
        with serving(*SMALL) as server:
            tree = server.processes
            stream = server.stream({"max_tokens": 600, "stream_options": {"include_usage": True}}).wait_begun()
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.get("/ready")[0] == 503, 5)
            for reply in (server.complete(), server.ask("GET", "/ready")):
                reply.check_error(503, "server_error", "draining")
                reply.check_retry_after(20)
            assert server.get("/health")[0] == 200
            assert server.wait_end(tree) == 128 + signal.SIGTERM
            stream.finish(1)
            assert (stream.finish_reason, stream.was_cut, stream.error) == ("length", False, None)
            assert stream.events[-1]["usage"]["completion_tokens"] == 600
            assert "labinfer: stopping at SIGTERM: 1 open request has 20 seconds to finish" in server.text
            assert "Traceback" not in server.text and "rror" not in server.text

    def test_what_takes_longer_than_it_may_ends_with_an_error(self):
        with serving(*SMALL, "--drain-timeout", "0.5") as server:
            stream = server.stream({"n": 16, "max_tokens": 1900}).wait_begun()
            with ThreadPoolExecutor() as threads:
                whole = threads.submit(server.complete, n=16, max_tokens=1900, ignore_eos=True)
                wait_for(lambda: server.metric("vllm:num_requests_running") == 32, 5)
                begin = time.monotonic()
                assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
                assert time.monotonic() - begin < 4
                whole.result(1).check_error(503, "server_error", "draining")
            assert stream.finish(1).error["code"] == "draining"
            assert "Traceback" not in server.text

    def test_second_signal_ends_it_at_once(self):
        with serving(*SMALL) as server:
            tree = server.processes
            stream = server.stream({"n": 16, "max_tokens": 1900}).wait_begun()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(1.5)
            assert server.process.poll() is None
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_end(tree) == 128 + signal.SIGTERM
            assert time.monotonic() - begin < 2
            assert stream.finish(1).error["type"] == "server_error"
            assert "Traceback" not in server.text

    def test_with_nothing_open_it_ends_soon_whoever_is_connected(self):
        with serving(*SMALL) as server:
            assert server.complete(structured_outputs={"choice": ["a", "b"]}).status == 200  # has a process of its own
            tree = server.processes
            idle = [server.connect() for _ in range(3)]
            idle[1].sendall(
                b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            )
            server.complete()
            time.sleep(0.3)
            begin = time.monotonic()
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does
            assert server.wait_end(tree) == 128 + signal.SIGINT
            assert time.monotonic() - begin < 4
            assert "labinfer: stopping at SIGINT: no open requests" in server.lines
            for connection in idle:
                assert connection.recv(1) == b""
                connection.close()
            assert "Traceback" not in server.text and "rror" not in server.text

    def test_it_ends_with_its_gateway(self):
        with serving(*SMALL) as server:
            assert server.complete(structured_outputs={"choice": ["a", "b"]}).status == 200
            tree, begin = server.processes, time.monotonic()
            os.kill(server.gateway_pid, signal.SIGKILL)
            assert server.wait_end(tree) == 70
            assert time.monotonic() - begin < 3
            assert server.lines[-1] == "labinfer: error: the gateway process was killed by SIGKILL; shutting down"

    def test_its_gateway_ends_with_it(self):
        with serving(*SMALL) as server:
            tree = server.processes
            stream = server.stream({}).wait_begun()
            os.kill(server.process.pid, signal.SIGKILL)
            assert server.wait_end(tree) == -signal.SIGKILL
            assert stream.finish(1).error["code"] == "engine_failed"
            assert not any(map(is_running, tree))
            assert "Traceback" not in server.text


# The start.


class TestStart:
    def test_what_is_wrong_is_said_in_one_line_before_anything_is_loaded(self, tmp_path):
        none, short = tmp_path / "none", tmp_path / "short"
        short.write_text("alice brief\n")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            wrong = {
                f"cannot listen on 127.0.0.1 port {port}: Address already in use": ["--port", port],
                "cannot listen on 192.0.2.1": ["--host", "192.0.2.1", "--port", "0"],
                "cannot listen on no.such.host.invalid": ["--host", "no.such.host.invalid", "--port", "0"],
                f"cannot read --api-key-file {none}": ["--api-key-file", none],
                f"--files-dir {short} cannot be used: Not a directory": ["--files-dir", short, "--port", "0"],
                "line 1: the key has 5 characters": ["--api-key-file", short, "--host", "0.0.0.0"],
                "no-such-model": ["--model", "no-such-model", "--port", "0"],
                "the name a is already in use": ["--model", "a=demo", "--model", "a=demo-draft"],
                "the name demo is already in use": ["--model", "demo", "--model", "demo"],
                "generation_config.json: temperature": ["--model", unwise_copy(tmp_path / "model"), "--port", "0"],
            }
            cases = {expected: ["serve", *flags] for expected, flags in wrong.items()}
            ended = run_in_turn("single", 1, cases, tmp_path / "said")
        for expected, done in ended.items():
            assert done.returncode == 2, done.text
            (line,) = done.our_errors
            assert expected in line and "brief" not in line
            assert "Traceback" not in done.text and "KV cache" not in done.text


def unwise_copy(directory: Path) -> Path:
    """The demo model, recommending a temperature that there is not."""
    directory.mkdir()
    for file in (Path(labinfer.__file__).parent / "assets/demo").iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "generation_config.json").unlink()
    (directory / "generation_config.json").write_text('{"temperature": -3}')
    return directory


# Several models, and figures.


@pytest.fixture(scope="module")
def two_models():
    """On all of this machine's addresses."""
    flags = ("--model", "a=demo", "--model", "b=demo-draft", "--dtype", "float32", "--num-kv-blocks", "256")
    with serving(*flags, "--host", "0.0.0.0") as server:
        yield server


class TestSeveralModels:
    def test_both_answer_as_they_would_alone(self, two_models):
        check_both_at_once(two_models)

    def test_everyone_is_let_in_with_a_warning(self, two_models):
        assert "authentication: none" in two_models.text
        assert (
            "labinfer: warning: the server has no API key and anyone who can reach this machine can use it"
            in two_models.text
        )

    def test_another_model_is_not_found(self, two_models):
        for name in ("demo", "a/", "../demo", "A", ""):
            reply = two_models.complete(model=name)
            reply.check_error(404, "invalid_request_error", "model_not_found")
        assert two_models.complete().body["model"] == "a"
        assert [one["id"] for one in two_models.get("/v1/models")[1]["data"]] == ["a", "b"]

    def test_figures_of_each_move(self, two_models):
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "labinfer:steps_total")
        time.sleep(0.3)  # the last word of an engine that comes to rest may be on its way
        before = {(name, model): two_models.metric(name, model_name=model) for name in names for model in "ab"}
        assert two_models.complete(model="b", max_tokens=9, ignore_eos=True).status == 200
        time.sleep(0.3)
        moved = {key: two_models.metric(key[0], model_name=key[1]) - value for key, value in before.items()}
        assert moved[names[0], "b"] == 2 and moved[names[1], "b"] == 9 and moved[names[2], "b"] == 9
        assert not any(moved[name, "a"] for name in names)

    def test_times_in_the_queue_are_counted(self, two_models):
        before = two_models.metric("vllm:request_queue_time_seconds_count", model_name="a")
        streams = [two_models.stream({"model": "a", "max_tokens": 20, "n": 4}) for _ in range(3)]
        for stream in streams:
            stream.finish()
        count = two_models.metric("vllm:request_queue_time_seconds_count", model_name="a")
        assert count == before + 12
        seconds = two_models.metric("vllm:request_queue_time_seconds_sum", model_name="a")
        assert 0 < seconds < two_models.metric("vllm:e2e_request_latency_seconds_sum", model_name="a")
