"""Hosts of a gateway: who is taken in, what clients see while there is none, and another one after the first."""

from __future__ import annotations

import contextlib
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from scripted_host import DEMO, END_SECONDS, MODEL_INFO, TOKEN, Gateway, Host, gateway, wait_ready
from serving import Stream, wait_for

import labinfer
from labinfer.base.errors import BrokenConnection, UserError
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.service import Model
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.link import local_socket
from labinfer.server.link.frames import (
    Attach,
    LayoutAnswer,
    Ready,
    Rebuilding,
    RegisterHost,
    Rejected,
    Shutdown,
    StatsUpdate,
)
from labinfer.server.link.framing import pack
from labinfer.text.tokenizer import Tokenizer


def test_host_is_told_when_requests_are_taken():
    with gateway(outlives_host=True) as server:
        for _ in range(2):
            with contextlib.closing(server.connect_host()) as connection:
                link = GatewayConnection(connection)
                link.send(Attach([MODEL_INFO]))
                wait_for(lambda link=link: Ready() in link.receive(END_SECONDS), END_SECONDS)
                assert server.get("/ready")[0] == 200


def test_stream_goes_on_with_another_host():
    """Which is given the tokens that there are, and nothing twice."""
    with gateway(outlives_host=True) as server, ThreadPoolExecutor() as threads:
        check_without_host(server)
        assert server.get("/health")[1]["status"] == "loading"
        with Host(server, "red blue", finishes=False):
            wait_ready(server)
            stream = Stream(server, {"max_tokens": 60}).wait_begun()
            assert server.get("/health")[1]["status"] == "ok"
        wait_for(lambda: server.get("/ready")[0] == 503, END_SECONDS)
        assert server.get("/health")[1]["status"] == "recovering"
        later = threads.submit(Stream, server, {"prompt": "green", "max_tokens": 60})  # waits for the next host
        with Host(server, " green") as host:
            assert (stream.finish().text, stream.finish_reason) == ("red blue green", "length")
            assert (later.result(END_SECONDS).finish().text, later.result().finish_reason) == (" green", "length")
            trial, second = host.added
            assert trial.admitted and not second.admitted
            assert Tokenizer(DEMO).decode(list(trial.request.output_token_ids)) == "red blue"
            assert second.request.output_token_ids == ()
            wait_ready(server)
            host.link.send(Shutdown())
            assert server.process.wait(END_SECONDS) == 0


def test_several_answers_go_on_one_by_one_with_their_own_seeds():
    with gateway(outlives_host=True) as server:
        with Host(server, "red", finishes=False):
            wait_ready(server)
            stream = Stream(server, {"max_tokens": 60, "n": 2, "seed": 7}).wait_begun()
        with Host(server, " green") as host:
            stream.finish()
            # Of the two answers only the first had begun. Both go on alone; the second again, when the trial is over.
            requests = [add.request for add in host.added]
            assert [(one.sampling.n, one.sampling.seed) for one in requests] == [(1, 7), (1, 8), (1, 8)]
            assert [len(one.output_token_ids) > 0 for one in requests] == [True, False, False]


def test_request_that_engines_die_of_is_given_up_alone():
    with gateway(outlives_host=True) as server:
        with Host(server, "red", finishes=False):
            wait_ready(server)
            streams = [Stream(server, {"max_tokens": 60}).wait_begun() for _ in range(3)]
        with Host(server, " blue" * 20, finishes=False, poison="poison") as host:
            wait_for(lambda: len(host.added) == 6, END_SECONDS)  # each alone, and then all
            poison = Stream(server, {"prompt": "poison", "max_tokens": 60})
            host.wait_dead()
        with Host(server, " blue" * 20, finishes=False, poison="poison") as host:
            host.wait_dead()
            assert host.most_at_once == 1
            assert host.added[-1].request.prompt_token_ids == Tokenizer(DEMO).encode("poison")
        error = poison.finish().error
        assert error["code"] == "engine_failed" and "2 times while it ran this request" in error["message"]
        with Host(server, " green"):
            for stream in streams:
                assert stream.finish().finish_reason == "length"
                assert stream.text.startswith("red blue") and stream.text.endswith(" green")


def test_next_suspect_is_not_blamed_for_one_that_engines_die_of_after_its_token():
    with gateway(outlives_host=True) as server:
        with Host(server, "red", finishes=False):
            wait_ready(server)
            poison, *streams = [
                Stream(server, {"prompt": prompt, "max_tokens": 60}).wait_begun()
                for prompt in ("poison", "red blue", "red blue")
            ]
        for _ in range(2):
            with Host(server, " blue", finishes=False, poison="poison", dies_late=True) as host:
                host.wait_dead()
        error = poison.finish().error
        assert error["code"] == "engine_failed" and "3 times while it ran this request" in error["message"]
        with Host(server, " green"):
            for stream in streams:
                assert (stream.finish().error, stream.finish_reason) == (None, "length")


def test_health_says_recovering_while_a_suspect_runs_alone():
    with gateway(outlives_host=True) as server:
        with Host(server, "red", finishes=False):
            wait_ready(server)
            streams = [Stream(server, {"max_tokens": 60}).wait_begun() for _ in range(2)]
        with Host(server, "", finishes=False) as host:
            wait_for(lambda: len(host.added) == 1, END_SECONDS)
            assert server.get("/health")[1]["status"] == "recovering"
            assert server.get("/ready")[0] == 503
            for stream in streams:
                stream.hang_up()
            wait_ready(server)
            assert server.get("/health")[1]["status"] == "idle"


def test_answers_do_not_go_on_with_another_model():
    with gateway(outlives_host=True) as server:
        with Host(server, "red", finishes=False):
            wait_ready(server)
            stream = Stream(server, {"max_tokens": 60}).wait_begun()
        with Host(server, "green", info=msgspec.structs.replace(MODEL_INFO, hidden_size=MODEL_INFO.hidden_size + 1)):
            error = stream.finish().error
            assert error["code"] == "engine_failed" and "other models" in error["message"]
            wait_for(lambda: server.complete(max_tokens=1).status == 200, END_SECONDS)


def check_changed(server: Gateway, stream: Stream) -> None:
    """An open answer has ended with the file that has changed, and requests are taken again."""
    error = stream.finish().error
    assert error["code"] == "engine_failed"
    assert "/models/m/model.safetensors has changed since the output began" in error["message"]
    wait_ready(server)
    assert server.complete(max_tokens=1).status == 200


def test_open_answers_end_where_the_files_of_their_model_have_changed():
    """After the death of a host, and after a change of the layout."""
    changed = msgspec.structs.replace(MODEL_INFO, changed="/models/m/model.safetensors has changed")
    with gateway(outlives_host=True) as server:
        with Host(server, "red", finishes=False):
            wait_ready(server)
            stream = Stream(server, {"max_tokens": 60}).wait_begun()
        with Host(server, "green", info=changed) as host:
            check_changed(server, stream)
            host.finishes = False
            stream = Stream(server, {"max_tokens": 60}).wait_begun()
            host.finishes = True
            host.link.send(Rebuilding())
            host.link.send(Attach([changed]))
            check_changed(server, stream)


def test_gateway_refuses_another_tokenizer_than_rank_0_has(tmp_path):
    Model.load(MODEL_INFO, ServerOptions()).reader.close()
    directory = Path(shutil.copytree(DEMO, tmp_path / "model"))
    with open(directory / "tokenizer.json", "a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="has changed since rank 0 loaded it"):
        Model.load(msgspec.structs.replace(MODEL_INFO, tokenizer=str(directory)), ServerOptions())


def test_streams_wait_while_the_layout_changes_and_go_on_in_the_next_one():
    with gateway(outlives_host=False) as server, ThreadPoolExecutor() as threads, Host(server, "red", False) as host:
        wait_ready(server)
        stream = Stream(server, {"max_tokens": 60}).wait_begun()
        change = threads.submit(server.ask, "POST", "/v1/cluster/layout", {"layers": [2]})
        wait_for(lambda: host.num_changes, END_SECONDS)
        host.link.send(Rebuilding())
        wait_for(lambda: server.get("/health")[1]["status"] == "rebuilding", END_SECONDS)
        server.ask("GET", "/ready").check_error(503, "server_error", "overloaded")
        later = threads.submit(Stream, server, {"prompt": "green", "max_tokens": 60})
        other = server.ask("POST", "/v1/cluster/layout", {"layers": [1]})
        other.check_error(409, "invalid_request_error", "conflict")
        assert len(host.added) == 1 and not later.done()
        host.finishes = True
        host.link.send(Attach([MODEL_INFO]))
        host.link.send(LayoutAnswer(seconds=0.5))
        assert (stream.finish().text, stream.finish_reason) == ("redred", "length")
        assert later.result(END_SECONDS).finish().text == "red"
        _, again, first = host.added
        assert again.admitted and Tokenizer(DEMO).decode(list(again.request.output_token_ids)) == "red"
        assert not first.admitted and first.request.output_token_ids == ()
        answer = change.result(END_SECONDS)
        assert (answer.status, answer.body["changed"], answer.body["pause_seconds"]) == (200, True, 0.5)


def test_layout_that_cannot_be_is_an_error_of_the_caller():
    with gateway(outlives_host=False) as server, ThreadPoolExecutor() as threads, Host(server, "red") as host:
        wait_ready(server)
        for answer, status in (
            (LayoutAnswer("layers 3 adds up to 3", is_refused=True), 400),
            (LayoutAnswer("no room", seconds=1.0), 409),
            (LayoutAnswer(is_refused=True, is_busy=True), 409),
        ):
            change = threads.submit(server.ask, "POST", "/v1/cluster/layout", {"layers": [3]})
            wait_for(lambda: not change.done() and host.num_changes, END_SECONDS)  # noqa: B023
            host.num_changes = 0
            host.link.send(answer)
            reply = change.result(END_SECONDS)
            assert reply.status == status and answer.problem in reply.error["message"]


def test_layout_cannot_be_changed_while_there_is_no_host():
    with gateway(outlives_host=True) as server:
        with Host(server, "red"):
            wait_ready(server)
        wait_for(lambda: server.get("/ready")[0] == 503, END_SECONDS)
        reply = server.ask("POST", "/v1/cluster/layout", {"layers": [2]})
        reply.check_error(503, "server_error", "overloaded")
        assert "is being restarted" in reply.error["message"] and int(reply.headers["retry-after"]) >= 1


def test_stream_fails_with_a_host_that_the_gateway_does_not_outlive():
    with gateway(outlives_host=False) as server:
        with Host(server, "red blue", finishes=False):
            wait_ready(server)
            stream = Stream(server, {"max_tokens": 60}).wait_begun()
        assert stream.finish().error["code"] == "engine_failed"


def check_without_host(server: Gateway) -> None:
    """It is alive, and takes no requests; whoever asks is told to come again."""
    assert server.get("/health")[0] == 200
    for reply in (server.ask("GET", "/ready"), server.complete()):
        reply.check_error(503, "server_error", "overloaded")
        reply.check_retry_after(10)


def test_who_comes_while_there_is_a_host_waits_for_its_end():
    with gateway(outlives_host=True) as server:
        with Host(server, "red"):
            wait_ready(server)
            after = Host(server, "green")
            assert server.complete(max_tokens=1).body["choices"][0]["text"].strip() == "red"
        with after:
            wait_for(lambda: server.complete(max_tokens=1).status == 200, END_SECONDS)
            assert server.complete(max_tokens=1).body["choices"][0]["text"].strip() == "green"


STRANGERS = [
    (RegisterHost(labinfer.__version__, "another secret", ["demo"]), "token"),
    (RegisterHost("0.0.0", TOKEN, ["demo"]), "its version is 0.0.0"),
    (RegisterHost(labinfer.__version__, TOKEN, ["other"]), "its models are other"),
]
NO_GREETINGS = (b"", pack(StatsUpdate([])), b"\xff" * 64)


def test_gateway_takes_in_its_own_host_alone_and_ends_with_it():
    with gateway(outlives_host=False) as server:
        for registration, says in STRANGERS:
            check_rejected(server, registration, says)
        for data in NO_GREETINGS:
            check_hung_up_on(server, data)
        with Host(server, "red"):
            wait_ready(server)
        assert server.process.wait(END_SECONDS) == 0


def check_rejected(server: Gateway, registration: RegisterHost, says: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.directory / local_socket.NAME))
        connection.sendall(pack(registration))
        link = GatewayConnection(connection)
        (frame,) = link.receive(END_SECONDS)
        assert isinstance(frame, Rejected) and says in frame.message
        with pytest.raises(BrokenConnection):
            link.receive(END_SECONDS)


def check_hung_up_on(server: Gateway, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.directory / local_socket.NAME))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(END_SECONDS)
        assert connection.recv(1) == b"", data
