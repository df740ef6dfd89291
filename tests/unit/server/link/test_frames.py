"""Frames between gateway and rank 0: whole in any pieces, and nonsense is a broken link."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.base.errors import BrokenConnection
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import Request
from labinfer.server.link.frames import Abort, Add, Attach, FromGateway, FromHost, ModelInfo
from labinfer.server.link.framing import LENGTH_BYTES, MAX_FRAME, FrameReader, pack

MODEL_INFO = ModelInfo(
    name="m",
    tokenizer="",
    needs_tokenizer=False,
    response_template="",
    chat_template="",
    recommended={},
    vocab_size=8,
    hidden_size=8,
    max_model_len=8,
    context_shift=False,
    num_layers=1,
    num_parameters=1000,
    block_size=4,
    num_blocks=2,
    max_num_seqs=1,
    pipeline_schedule="1f1b",
    ranks=[],
)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def test_frames_come_whole_whatever_the_pieces():
    frames = [Abort("a"), Abort("b", 3)]
    data = b"".join(map(pack, frames))
    reader = FrameReader(FromGateway)
    assert [frame for byte in data for frame in reader.feed(bytes([byte]))] == frames
    assert FrameReader(FromGateway).feed(data) == frames


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        framed(b"\xc1"),
        framed(msgspec.msgpack.encode(["nothing", 1])),
        framed(msgspec.msgpack.encode(["abort", 1])),
        framed(b"\x92\xa5abort\xa1\xff"),
        framed(b"\x93\xa3add\xa1m" + b"\x91" * 100_000),
        framed(b"\x93\xa3add\xa1m\x93\xa1k\x90\xde\x00\x01" + b"\x91" * 100_000),
        framed(b"\x94\xa5abort\xa1x\xc0" + b"\x91" * 100_000 + b"\x90"),
        (MAX_FRAME + 1).to_bytes(LENGTH_BYTES, "little"),
    ],
    ids=[
        "nothing",
        "no MessagePack",
        "unknown",
        "another type",
        "no UTF-8",
        "deep",
        "deep inside",
        "deep rest",
        "long",
    ],
)
def test_what_makes_no_sense_breaks_the_link(data):
    with pytest.raises(BrokenConnection):
        FrameReader(FromGateway).feed(data)


def test_request_takes_the_tokens_it_has_along():
    request = Request(key="0:id", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), output_token_ids=(4, 5))
    assert FrameReader(FromGateway).feed(pack(Add("m", request))) == [Add("m", request)]


def test_recommended_counts_stay_whole_numbers():
    recommended = {"temperature": 0.3, "top_k": 20}
    info = msgspec.structs.replace(MODEL_INFO, recommended=recommended)
    (attach,) = FrameReader(FromHost).feed(pack(Attach([info])))
    assert SamplingParams(**attach.models[0].recommended) == SamplingParams(**recommended)
