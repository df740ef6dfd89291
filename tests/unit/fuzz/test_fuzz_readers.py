"""Mutated input for everything that reads bytes of others: a sample here, more with ``make fuzz``."""

from __future__ import annotations

import json
import random
import socket
import threading

import msgspec
import pytest
import torch
from fuzzing import fuzz, mutate
from safetensors.torch import save

from labinfer.batch.reader import JsonlReader
from labinfer.comm import wire
from labinfer.comm.lifeline import Lifeline
from labinfer.comm.lifeline_messages import Failure, Goodbye, Hello, State, Stats
from labinfer.comm.lifeline_server import LifelineServer
from labinfer.errors import BrokenLink, UserError
from labinfer.jsonl import parse_line
from labinfer.link.frames import Abort, FromGateway
from labinfer.link.framing import FrameReader
from labinfer.link.framing import pack as pack_frame
from labinfer.plan import Command
from labinfer.rank_stats import WorkerStats
from labinfer.sampling_params import SamplingParams
from labinfer.text import limited_rendering
from labinfer.text.chat_template import ChatTemplate
from labinfer.weights.checkpoint import Checkpoint

KEY = "secret"


@pytest.fixture
def cases(request):
    """Number and seed, as ``fuzz`` takes them; a test names its sample."""

    def choose(sample: int) -> dict[str, int]:
        option = request.config.getoption
        return {"cases": option("--fuzz-cases") or sample, "seed": option("--fuzz-seed")}

    return choose


LINES = [
    json.dumps(line).encode()
    for line in (
        {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "seed": 7, "stop": ["x"], "logit_bias": {"5": 1}},
        {"prompt_token_ids": [1, 2, 3], "id": "7", "structured_outputs": {"json": {"type": "object"}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "chat_template_kwargs": {"a": 1}},
        {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [], "n": 2},
        },
        {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": ["a", "b"]}},
    )
]


def test_lines_of_a_job_are_read_or_refused(cases, tmp_path):
    path = tmp_path / "in.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for _, line in JsonlReader(str(path), 1 << 16):
            if isinstance(line, bytes):
                parse_line(line, SamplingParams())

    fuzz(read, [*LINES, b"\n".join(LINES)], refusals=(UserError,), **cases(100))


FRAMES = [pack_frame(Abort("r1", 0)), pack_frame(Abort("r1", 0)) * 3]


def test_frames_of_a_gateway_are_read_or_break_the_link(cases):
    fuzz(lambda data: FrameReader(FromGateway).feed(data), FRAMES, refusals=(BrokenLink,), **cases(1000))


def test_commands_and_reports_of_ranks_are_read_or_refused(cases):
    commands, reports = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(WorkerStats)
    seeds = [torch.cat(wire.pack(message)).numpy().tobytes()[:512] for message in (Goodbye(), Stats(b"a" * 80))]
    seeds += [len(data).to_bytes(4, "little") + data for data in map(msgspec.msgpack.encode, ([1, [2, 3]], {"a": "b"}))]

    def read(data: bytes) -> None:
        first = torch.frombuffer(bytearray(data.ljust(wire.CHUNK, b"\0")[: wire.CHUNK]), dtype=torch.uint8)
        size = wire.rest_size(first)
        rest = (
            torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8) if 0 < size < 1e6 else None
        )
        for decoder in (commands, reports):
            wire.unpack(first, rest, decoder)

    fuzz(read, seeds, refusals=(wire.WireError,), **cases(600))


def test_safetensors_files_are_read_or_refused(cases, tmp_path):
    small = save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"format": "pt"})
    path = tmp_path / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        checkpoint = Checkpoint(tmp_path)
        for name in checkpoint.names:
            shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
            if dtype is not None:
                checkpoint.read(name, shape, (), dtype)

    (tmp_path / "config.json").write_text("{}")
    fuzz(read, [small], refusals=(UserError,), **cases(100))


TEMPLATES = [
    b"{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}",
    b"{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{{ n.x * 7 }}{% endfor %}",
    b"{% macro f(a, b=2) %}{{ a|tojson(indent=b) }}{{ a|trim|upper }}{% endmacro %}{{ f(messages[0].content) }}",
    b"{{ '%s' % messages|length }}{{ messages|map(attribute='role')|join(', ') }}{% if tools %}{{ tools[0] }}{% endif %}",
    b"{% generation %}{{ raise_exception('no') if messages[0].role != 'user' }}{% endgeneration %}{{ range(9)|list }}",
    b"{{ ''.__class__.__mro__ }}{{ messages.append(1) }}{{ strftime_now('%Y') }}{{ 'a' * 9 ** 9 }}",
]


def test_chat_templates_render_or_refuse(cases, monkeypatch):
    monkeypatch.setattr(limited_rendering, "RENDER_SECONDS", 1.0)
    messages = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "ho"}]

    def read(data: bytes) -> None:
        ChatTemplate(data.decode(errors="replace"), {"eos_token": "</s>"}).render(messages)

    fuzz(read, TEMPLATES, refusals=(UserError,), **cases(60))


def framed(*messages: msgspec.Struct) -> bytes:
    encoded = map(msgspec.msgpack.encode, messages)
    return b"".join(len(data).to_bytes(4, "little") + data for data in encoded)


def test_strangers_at_the_lifelines_port_hold_up_nobody(cases):
    number = cases(150)
    draw, seeds = (
        random.Random(number["seed"]),
        [framed(Hello(1, "guess"), Goodbye()), framed(Hello(1, KEY))[:9], b"GET / "],
    )
    server, made = LifelineServer(1, KEY), []
    accepting = threading.Thread(
        target=lambda: made.append(server.accept_all(300.0, lambda: "", lambda text, last: None)), daemon=True
    )
    accepting.start()
    strangers: list[socket.socket] = []
    for case in range(number["cases"]):
        data = mutate(draw, seeds)[:4096]
        if KEY.encode() in data:
            continue
        strangers.append(socket.create_connection(("127.0.0.1", server.port), timeout=5))
        strangers[-1].sendall(data)
        if len(strangers) > 30 or case == number["cases"] - 1:
            for stranger in strangers:
                stranger.close()
            strangers.clear()
        assert accepting.is_alive()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as follower:
        follower.sendall(framed(Hello(1, KEY)))
        accepting.join(5)
        assert made
        made[0].close()


def test_nonsense_on_a_lifeline_ends_its_group_and_nothing_else(cases):
    seeds = [framed(State("a"), Stats(b"b"), State("c")), framed(Failure("rank 1 fails")), framed(Goodbye())]
    number = cases(20)
    number["cases"] = min(number["cases"], 500)  # each takes a thread, which waits for the rank's own account

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            line = Lifeline(0, {1: ours}, lambda: "", lambda text, last: None)
            theirs.sendall(data[:4096])
            theirs.shutdown(socket.SHUT_WR)
            line._thread.join(5)
            assert not line._thread.is_alive()

    fuzz(read, seeds, refusals=(), **number)
