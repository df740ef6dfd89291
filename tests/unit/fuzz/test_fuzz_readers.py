"""Mutated input for everything that reads bytes of others: a sample here, more with ``make fuzz``."""

from __future__ import annotations

import json
import random
import socket
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from fuzzing import fuzz, mutate, mutate_json
from msgspec import structs
from safetensors.torch import save

import labinfer
from labinfer.api.batch.reader import JsonlReader
from labinfer.base.errors import BrokenConnection, UserError
from labinfer.base.plan import BatchEntry, BatchPlan, CacheMove, Command, EndRun, SequenceStart, TokenSampling
from labinfer.base.rank_stats import WorkerStats
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.comm import health_channel, wire
from labinfer.comm.communicator import Finished, Handle
from labinfer.comm.control import ControlChannel
from labinfer.comm.health_channel import HealthChannel
from labinfer.comm.health_messages import Failure, Goodbye, RegisterRank, State, StatsReply
from labinfer.comm.health_server import HealthServer
from labinfer.comm.local import LocalCommunicator
from labinfer.engine.request import Request
from labinfer.requests.json_decode import decode_json
from labinfer.requests.jsonl import parse_line
from labinfer.server.link.frames import Abort, Add, FromGateway, Heartbeat, Watch
from labinfer.server.link.framing import FrameReader
from labinfer.server.link.framing import pack as pack_frame
from labinfer.text import limited_rendering
from labinfer.text.chat_template import ChatTemplate
from labinfer.text.grammar_sandbox import GrammarSandbox
from labinfer.text.guidance import GrammarGuideMaker
from labinfer.text.tokenizer import Tokenizer
from labinfer.weights.model_files import open_model

KEY = "secret"


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
        with closing(JsonlReader(str(path), 1 << 16)) as reader:
            for _, line in reader:
                if isinstance(line, bytes):
                    parse_line(line, SamplingParams())

    fuzz(read, [*LINES, b"\n".join(LINES)], refusals=(UserError,), **cases(100))
    fuzz(read, LINES, refusals=(UserError,), change=mutate_json, **cases(100))


REQUEST = Request(
    key="r1", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(stop=["x"], logit_bias={5: 1.0}, seed=7)
)
FRAMES = [
    pack_frame(Abort("r1", 0)),
    pack_frame(Abort("r1", 0)) * 3,
    pack_frame(Add("demo", REQUEST)) + pack_frame(Watch(on=True)) + pack_frame(Heartbeat()),
]


def test_frames_of_a_gateway_are_read_or_break_the_link(cases):
    counts = fuzz(lambda data: FrameReader(FromGateway).feed(data), FRAMES, refusals=(BrokenConnection,), **cases(1000))
    assert counts["taken"] > counts.total() // 20, "the seeds are refused before anything is read"


PLAN = BatchPlan(
    step_id=3,
    starts=[SequenceStart(1, [5, 6, 7], TokenSampling(num_prompt_tokens=3, processors=[("bias", {5: 1.0})]))],
    finished=[0],
    moves=[CacheMove("copy", [1], [2], 4)],
    entries=[BatchEntry(seq_id=1, num_tokens=3, begin=0, position=0, first_block=0, new_blocks=[4], num_samples=1)],
)
STATS = WorkerStats(
    rank=1,
    stage=1,
    tp_rank=0,
    num_steps=7,
    busy_time=0.5,
    peak_memory=1 << 30,
    private_memory=1 << 20,
    weight_bytes_read=9,
    num_threads=2,
    cpus="0-1",
    bytes_sent={0: 5},
)


class Sender(LocalCommunicator):
    """A rank of two, whom the other one sends these bytes, whatever is asked for, and zeros behind them."""

    def __init__(self, rank: int, data: bytes):
        super().__init__(rank=rank, size=2)
        self._data = data

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        piece, self._data = self._data[: len(tensor)], self._data[len(tensor) :]
        tensor.copy_(torch.frombuffer(bytearray(piece.ljust(len(tensor), b"\0")), dtype=torch.uint8))
        return Finished()


@pytest.mark.parametrize(
    ("rank", "messages", "receive"),
    [
        (1, (PLAN, EndRun([1]), structs.replace(PLAN, finished=list(range(3000)))), ControlChannel.receive),
        (0, (STATS,), ControlChannel.collect),
    ],
    ids=("commands", "reports"),
)
def test_control_channel_reads_what_ranks_send_or_refuses_it(rank, messages, receive, cases):
    seeds = [torch.cat(wire.pack(message)).numpy().tobytes().rstrip(b"\0") for message in messages]

    def read(data: bytes) -> None:
        if int.from_bytes(data[: wire.LENGTH_BYTES], "little") > 1 << 20:
            raise wire.WireError  # as much as is announced is waited for, up to MAX_MESSAGE
        receive(ControlChannel(Sender(rank, data), Command, WorkerStats))

    counts = fuzz(read, seeds, refusals=(wire.WireError,), **cases(300))
    assert counts["taken"] > counts.total() // 20, "the seeds are refused before anything is read"


def test_safetensors_files_are_read_or_refused(cases, tmp_path):
    small = save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"format": "pt"})
    path = tmp_path / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        checkpoint = open_model(tmp_path).open_weights()
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


FORMS = [
    json.dumps(form).encode()
    for form in (
        {"regex": r"(a|b)*[^c]{2,5}\d+(?i:x)\p{L}"},
        {"choice": ["yes", "no", "\x7f"]},
        {"grammar": 'start: "a" b+ | C\nb: /[0-9]+/ start?\nC: "x".."z"\n%ignore / /'},
        {
            "json": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 1},
                    "b": {"$ref": "#/$defs/b"},
                    "c": {"format": "date"},
                },
                "required": ["a"],
                "patternProperties": {"^x": {"type": ["string", "null"], "maxLength": 3, "pattern": "a+"}},
                "additionalProperties": {"anyOf": [{"enum": [1, "x"]}, {"const": None}, {"not": {"type": "array"}}]},
                "$defs": {"b": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 2, "uniqueItems": True}},
            }
        },
    )
]


def test_forms_of_answers_are_tried_and_followed_or_refused(cases):
    demo = Tokenizer(Path(labinfer.__file__).parent / "assets" / "demo")
    sandbox, maker, draw = (
        GrammarSandbox(lambda: demo),
        GrammarGuideMaker(lambda: demo, demo.vocab_size, [2]),
        random.Random(1),
    )

    def read(data: bytes) -> None:
        form = decode_json(data, StructuredOutputs)
        sandbox.check(form)
        guide = maker.make(form)
        for _ in range(8):
            allowed = int.from_bytes(guide.mask, "little") & ~(1 << 2)
            if not allowed:
                break
            rest = allowed >> draw.randrange(allowed.bit_length())
            guide.accept(allowed.bit_length() - rest.bit_length() + (rest & -rest).bit_length() - 1)

    fuzz(read, FORMS, refusals=(UserError,), change=mutate_json, **cases(60))
    sandbox.close()


def framed(*messages: msgspec.Struct) -> bytes:
    encoded = map(msgspec.msgpack.encode, messages)
    return b"".join(len(data).to_bytes(4, "little") + data for data in encoded)


def test_strangers_at_the_health_channels_port_hold_up_nobody(cases):
    number = cases(150)
    draw, seeds = (
        random.Random(number["seed"]),
        [framed(RegisterRank(1, "guess"), Goodbye()), framed(RegisterRank(1, KEY))[:9], b"GET / "],
    )
    server, made = HealthServer(1, KEY), []
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
        follower.sendall(framed(RegisterRank(1, KEY)))
        accepting.join(5)
        assert made
        made[0].close()


def test_nonsense_on_a_health_channel_ends_its_group_and_nothing_else(cases, monkeypatch):
    monkeypatch.setattr(
        health_channel, "GRACE_SECONDS", 0.0
    )  # or as many threads as cases wait for a rank's own account
    seeds = [framed(State("a"), StatsReply(b"b"), State("c")), framed(Failure("rank 1 fails")), framed(Goodbye())]

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            line = HealthChannel(0, {1: ours}, lambda: "", lambda text, last: None)
            theirs.sendall(data[:4096])
            theirs.shutdown(socket.SHUT_WR)
            line._thread.join(5)
            assert not line._thread.is_alive()

    fuzz(read, seeds, refusals=(), **cases(20))
