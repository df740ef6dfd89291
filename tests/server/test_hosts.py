"""Hosts of a gateway: who is taken in, what clients see while there is none, and another one after the first."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from serving import Server, Stream, wait_for

import labinfer
from labinfer.base.errors import BrokenConnection, UserError
from labinfer.engine.request import AnswerUpdate, FinishReason
from labinfer.server.gateway.options import ServerOptions, Setup
from labinfer.server.gateway.process import start_gateway
from labinfer.server.gateway.service import Model
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.link import local_socket
from labinfer.server.link.frames import (
    Accepted,
    Add,
    Attach,
    ChangeLayout,
    LayoutAnswer,
    ModelInfo,
    Ready,
    Rebuilding,
    RegisterHost,
    Rejected,
    Shutdown,
    StatsUpdate,
    Updates,
)
from labinfer.server.link.framing import pack
from labinfer.text.tokenizer import Tokenizer

TOKEN = "a secret of these tests"
DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
MODEL_INFO = ModelInfo(
    name="demo",
    tokenizer=str(DEMO),
    tokenizer_digest=Tokenizer(DEMO).digest,
    needs_tokenizer=True,
    response_template="",
    chat_template="",
    recommended={},
    vocab_size=3072,
    hidden_size=64,
    max_model_len=64,
    context_shift=False,
    num_layers=2,
    num_parameters=1000,
    block_size=16,
    num_blocks=8,
    max_num_seqs=4,
    pipeline_schedule="1f1b",
    ranks=[],
)
END_SECONDS = 10.0


class Gateway(Server):
    """A gateway process without a host."""

    def __init__(self, process: subprocess.Popen, port: int, directory: Path):
        super().__init__(process, f"http://127.0.0.1:{port}", Path(os.devnull))
        self.directory = directory

    def connect_host(self) -> socket.socket:
        return local_socket.connect(self.directory, TOKEN, ["demo"])


@contextmanager
def gateway(outlives_host: bool) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory() as directory:
        hosts, listener = local_socket.listen(Path(directory)), socket.create_server(("127.0.0.1", 0))
        setup = Setup(
            options=ServerOptions(),
            model_names=["demo"],
            cpus=sorted(os.sched_getaffinity(0)),
            log_level="error",
            token=TOKEN,
            fault_timeout=3600.0,  # these hosts give no signs of life
            outlives_host=outlives_host,
        )
        with hosts, listener:
            port = listener.getsockname()[1]
            process = start_gateway(setup, hosts, listener)
        try:
            yield Gateway(process, port, Path(directory))
        finally:
            process.kill()
            process.wait()


class Host:
    """An engine host whose every answer is these tokens; without ``finishes``, the end of an answer never comes.

    As a context it is attached, and at the end gone without goodbye.
    """

    def __init__(
        self,
        gateway: Gateway,
        text: str,
        finishes: bool = True,
        poison: str = "",
        dies_late: bool = False,
        info: ModelInfo = MODEL_INFO,
    ):
        self._connection = gateway.connect_host()
        self.link = GatewayConnection(self._connection)
        tokenizer = Tokenizer(DEMO)
        self._token_ids = tokenizer.encode(text, add_special_tokens=False)
        self._dies_late = dies_late
        self._poison = tokenizer.encode(poison, add_special_tokens=False) if poison else None
        self.finishes, self._is_ending, self._info = finishes, False, info
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.added: list[Add] = []
        self.most_at_once = self.num_changes = 0

    def __enter__(self) -> Host:
        self.link.send(Attach([self._info]))
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._is_ending = True
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        with contextlib.suppress(BrokenConnection):  # the gateway ends first where the host says goodbye
            while not self._is_ending:
                frames = self.link.receive(0.02)
                adds = [frame for frame in frames if isinstance(frame, Add)]
                self.num_changes += sum(isinstance(frame, ChangeLayout) for frame in frames)
                self.most_at_once = max(self.most_at_once, len(adds))
                self.added += adds
                if self._poison in [add.request.prompt_token_ids for add in adds]:
                    for add in adds:
                        self.link.send(Accepted(add.request.key))
                        if self._dies_late:
                            self._answer(add.request.key)
                    self._connection.shutdown(socket.SHUT_RDWR)  # it dies of that request
                    return
                for add in adds:
                    self._answer(add.request.key)

    def wait_dead(self) -> None:
        self._thread.join(END_SECONDS)
        assert not self._thread.is_alive()

    def _answer(self, key: str) -> None:
        self.link.send(Accepted(key))
        reason = FinishReason.LENGTH if self.finishes else None
        update = AnswerUpdate(index=0, token_ids=self._token_ids, logprobs=[], finish_reason=reason)
        self.link.send(Updates([(key, update)]))


def wait_ready(gateway: Gateway) -> None:
    wait_for(lambda: gateway.get("/ready")[0] == 200, END_SECONDS)


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
    assert "/models/m/model.safetensors has changed since the answer began" in error["message"]
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
    with pytest.raises(UserError, match="has changed since rank 0 read it"):
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
        assert "another one is awaited" in reply.error["message"] and int(reply.headers["retry-after"]) >= 1


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
    (RegisterHost("0.0.0", TOKEN, ["demo"]), "it is version 0.0.0"),
    (RegisterHost(labinfer.__version__, TOKEN, ["other"]), "it has the models other"),
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
