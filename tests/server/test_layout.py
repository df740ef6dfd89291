"""``POST /v1/cluster/layout``: what is refused, precision that changes while requests run, and the way back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from safetensors.torch import load_file, save_file
from serving import Stream, serving

import labinfer
from labinfer.base.config import DTYPES, QUANTIZATIONS
from labinfer.server.link.layout_change import LayoutChange

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
KEY = "key-for-layouts"
LAYOUT = "/v1/cluster/layout"
USAGE = {"include_usage": True}
STAGE = {"machine": "a", "layers": 6, "tp_size": 1, "dtype": "float32", "quantization": "none"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model whose last norm is so large that float16 has no numbers for what comes out of it."""
    directory = tmp_path_factory.mktemp("large")
    for path in DEMO.iterdir():
        shutil.copy(path, directory / path.name)
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"].float() * 5e3
    save_file(weights, file, {"format": "pt"})
    with serving("--model", f"demo={directory}", "--dtype", "float32", "--api-key", KEY) as server:
        yield server
        server.wait_idle(key=KEY)
        assert "Traceback" not in server.text


def test_caller_without_the_key_changes_nothing(server):
    server.ask("POST", LAYOUT, {"quantization": "int8"}).check_error(401, "invalid_request_error", "invalid_api_key")
    server.ask("POST", LAYOUT, {"quantization": "int8"}, "another").check_error(
        401, "invalid_request_error", "invalid_api_key"
    )


WRONG = [
    ({"layers": [3, 2]}, "needs 2 ranks", None),
    ({"layers": [5]}, "adds up to 5, but the model has 6", "layers"),
    ({"layers": []}, "length", "layers"),
    ({"ranks": [1]}, "ranks are 0 to 0", "ranks"),
    ({"tensor_parallel_size": [2]}, "needs 2 ranks", None),
    ({"tensor_parallel_size": 1}, "array", "tensor_parallel_size"),
    ({"dtype": ["float32", "bfloat16"]}, "has 2 values for 1 stage", "dtype"),
    ({"dtype": ["float8"]}, "float8", "dtype"),
    ({"quantization": "int3"}, "int3", "quantization"),
    ({"quantization": ["none", "int3"]}, "int3", "quantization"),
    ({"quantization": []}, "length", "quantization"),
    ({"quantization": 8}, "quantization", "quantization"),
    ({"quantization": ["none", "int8"]}, "has 2 values for 1 stage", "quantization"),
    ({"plan": {"model": "other", "stages": [STAGE]}}, "plan is for another model", "plan"),
    ({"plan": {"model": "other", "stages": []}}, "length", "plan"),
    ({"layer": [6]}, "did you mean 'layers'", "layer"),
    ([], "object", None),
]


@pytest.mark.parametrize(("body", "says", "param"), WRONG, ids=lambda value: str(value))
def test_wrong_layout_is_refused_in_one_line(server, body, says, param):
    reply = server.ask("POST", LAYOUT, body, KEY)
    assert reply.status == 400 and says in reply.error["message"] and "\n" not in reply.error["message"], reply.body
    assert reply.error["param"] == param and "--" not in reply.error["message"].replace("--nproc", "")


def test_layout_that_is_there_takes_no_pause(server):
    status, answer = server.post(LAYOUT, {"layers": [6], "dtype": ["float32"]}, KEY)
    assert (status, answer["changed"], answer["pause_seconds"]) == (200, False, 0)


def test_layout_that_computes_no_numbers_is_left_again_and_streams_go_on(server):
    undisturbed = Stream(server, {"max_tokens": 300}, KEY).finish().text
    stream = Stream(server, {"max_tokens": 300}, KEY).wait_begun()
    reply = server.ask("POST", LAYOUT, {"dtype": ["float16"]}, KEY)
    reply.check_error(409, "invalid_request_error", "conflict")
    assert "not finite" in reply.error["message"] and "previous layout" in reply.error["message"]
    assert (stream.finish().text, stream.error) == (undisturbed, None)
    assert server.get("/v1/cluster", KEY)[1]["ranks"][0]["dtype"] == "float32"


def test_two_changes_of_precision_under_load_lose_nothing(server):
    lengths = [100 + 20 * number for number in range(8)]
    streams = [Stream(server, {"max_tokens": length, "stream_options": USAGE}, KEY) for length in lengths]
    for stream in streams:
        stream.wait_begun()
    for quantization, name in (("int8", "int8"), (["none"], "none")):
        status, answer = server.post(LAYOUT, {"quantization": quantization}, KEY)
        assert (status, answer["changed"], answer["quantization"]) == (200, True, name)
        assert (
            answer["ranks"][0]["quantization"] == server.get("/v1/cluster", KEY)[1]["ranks"][0]["quantization"] == name
        )
        assert server.complete(KEY).status == 200
    for stream, length in zip(streams, lengths, strict=True):
        assert (stream.finish().error, stream.events[-1]["usage"]["completion_tokens"]) == (None, length)


def test_fields_offer_what_the_flags_offer():
    hints = get_type_hints(LayoutChange)
    dtypes, (one, several, _) = get_args(hints["dtype"])[0], get_args(hints["quantization"])
    assert get_args(get_args(dtypes)[0]) == DTYPES
    assert get_args(one) == get_args(get_args(several)[0]) == QUANTIZATIONS
