"""RequestLog: what a line says, and that no caller can write one of its own."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labinfer.server.gateway.request_log import FinishedRequest, RequestLog

DONE = FinishedRequest(
    id="chatcmpl-17",
    caller="web-app",
    route="/v1/chat/completions",
    model="demo",
    status=200,
    prompt_tokens=40,
    cached_tokens=32,
    generated_tokens=11,
    ttft_seconds=0.05123456789,
    total_seconds=1.5,
    finish_reason="stop",
)
REFUSED = FinishedRequest(id="req-3", caller="anonymous", route="/v1/models", status=401, total_seconds=0.001)


def lines(*requests: FinishedRequest, as_json: bool = False) -> list[str]:
    stream = io.StringIO()
    log = RequestLog(stream, as_json, lambda: 1_767_323_045.678)
    for request in requests:
        log.write(request)
    written = stream.getvalue()
    assert written.endswith("\n")
    return written[:-1].split("\n")


def test_text_line_has_what_there_is():
    assert lines(DONE, REFUSED) == [
        "time=2026-01-02T03:04:05.678+00:00 id=chatcmpl-17 caller=web-app route=/v1/chat/completions status=200 "
        "total_seconds=1.5 model=demo prompt_tokens=40 cached_tokens=32 generated_tokens=11 ttft_seconds=0.051235 "
        "finish_reason=stop",
        "time=2026-01-02T03:04:05.678+00:00 id=req-3 caller=anonymous route=/v1/models status=401 total_seconds=0.001",
    ]


def test_json_line_has_all_fields_always():
    done, refused = (json.loads(line) for line in lines(DONE, REFUSED, as_json=True))
    assert done == {
        "time": "2026-01-02T03:04:05.678+00:00",
        "id": "chatcmpl-17",
        "caller": "web-app",
        "route": "/v1/chat/completions",
        "status": 200,
        "total_seconds": 1.5,
        "model": "demo",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "generated_tokens": 11,
        "ttft_seconds": 0.051235,
        "finish_reason": "stop",
    }
    assert refused.keys() == done.keys()
    assert refused["model"] is refused["ttft_seconds"] is refused["finish_reason"] is None


FORGERIES = [
    "x\ntime=2026-01-02T03:04:05.678+00:00 id=forged status=200",
    "x\r\nforged",
    "x\x1b[2Jforged",
    "x status=200",
    'x" status=200',
    "status=200",
    "x\u2028forged",
    "x\x85forged",
    "x\x7f",
    "\x00",
    "\ud800",
    "",
]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_a_caller_chooses_stays_in_its_place(forgery, as_json):
    (line,) = lines(replace(DONE, id=forgery, model=forgery), as_json=as_json)
    assert line.isascii() and line.isprintable()
    if as_json:
        assert json.loads(line)["id"] == forgery and json.loads(line)["status"] == 200
    else:
        quoted = json.dumps(forgery)
        assert f" id={quoted} " in line and f" model={quoted} " in line
        assert line.replace(quoted, "").count("status=") == 1


@given(st.text(max_size=300), st.booleans())
def test_request_is_one_printable_line_whatever_its_id(text, as_json):
    (line,) = lines(replace(DONE, id=text), as_json=as_json)
    assert line.isascii() and line.isprintable()


def test_long_names_are_cut():
    (line,) = lines(replace(DONE, model="m" * 10**6))
    assert "m" * 256 in line and "m" * 257 not in line


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_log_that_cannot_be_written_fails_nothing():
    closed = io.StringIO()
    closed.close()
    for stream in (Broken(), closed):
        RequestLog(stream, as_json=False).write(DONE)


def test_line_is_there_at_once(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        RequestLog(stream, as_json=False).write(DONE)
        assert (tmp_path / "log").read_text().count("\n") == 1
