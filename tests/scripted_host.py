"""A gateway process with hosts that a test scripts: no engine runs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import Server, wait_for

import labinfer
from labinfer.base.errors import BrokenConnection
from labinfer.engine.request import AnswerUpdate, FinishReason
from labinfer.server.gateway.options import ServerOptions, Setup
from labinfer.server.gateway.process import start_gateway
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.link import local_socket
from labinfer.server.link.frames import Accepted, Add, Attach, ChangeLayout, ModelInfo, Updates
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
START_SECONDS = 60.0
"""For a gateway process to start, on a machine that is busy."""


class Gateway(Server):
    """A gateway process without a host."""

    def __init__(self, process: subprocess.Popen, port: int, directory: Path):
        super().__init__(process, f"http://127.0.0.1:{port}", Path(os.devnull))
        self.directory = directory

    def connect_host(self) -> socket.socket:
        return local_socket.connect(self.directory, TOKEN, ["demo"])


@contextmanager
def gateway(
    outlives_host: bool, fault_timeout: float = 3600.0, log_level: str = "error", **options
) -> Iterator[Gateway]:
    """A gateway process.

    Args:
        fault_timeout: seconds; the hosts send no heartbeats.
        options: of ``ServerOptions``.
    """
    with tempfile.TemporaryDirectory() as directory:
        hosts, listener = local_socket.listen(Path(directory)), socket.create_server(("127.0.0.1", 0))
        setup = Setup(
            options=ServerOptions(**options),
            model_names=["demo"],
            cpus=sorted(os.sched_getaffinity(0)),
            log_level=log_level,
            token=TOKEN,
            fault_timeout=fault_timeout,
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
    wait_for(lambda: gateway.get("/ready")[0] == 200, START_SECONDS)
