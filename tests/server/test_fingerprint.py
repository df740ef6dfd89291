"""The fingerprint of a served model: the same in its description, in every response, and in every event of a stream."""

from __future__ import annotations

import json

import pytest
from serving import serving

CHAT = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 4, "seed": 1}
TEXT = {"prompt": "red", "max_tokens": 4, "seed": 1}


@pytest.mark.parametrize("flags", [(), ("--reproducible",)], ids=["free", "reproducible"])
def test_fingerprint_is_in_every_response_and_event(flags):
    with serving("--dtype", "float32", "--num-kv-blocks", "64", "--no-autotune", *flags) as server:
        (model,) = server.get("/v1/models")[1]["data"]
        cluster = server.get("/v1/cluster")[1]
        assert model["reproducible"] is cluster["reproducible"] is bool(flags)
        assert model["fingerprint"] == cluster["fingerprint"] and model["fingerprint"].startswith("fp_")
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            assert server.post(path, body)[1]["system_fingerprint"] == model["fingerprint"]
            text = server.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})[1]
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert len(events) > 2 and {event["system_fingerprint"] for event in events} == {model["fingerprint"]}
