"""Bounds of bodies of the routes beside OpenAI's first three."""

from __future__ import annotations

import json

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.requests.json_decode import WrongBody, decode_json
from labinfer.requests.jsonl import SimpleLine
from labinfer.requests.openai.files import BatchBody
from labinfer.requests.openai.response_body import ResponseBody
from labinfer.requests.protocol import MAX_INPUTS
from labinfer.server.gateway.endpoints import API
from labinfer.server.gateway.routes.pooling import ScoreBody

BATCH = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(("kind", "fields"), [(BatchBody, BATCH), (ResponseBody, {"input": "a"})])
@pytest.mark.parametrize("metadata", [{"a" * 65: "b"}, {"a": "b" * 513}, {str(n): "" for n in range(17)}])
def test_metadata_are_bounded(kind, fields, metadata):
    longest = {str(n) + "a" * 62: "b" * 512 for n in range(16)}
    assert decode_json(json.dumps(fields | {"metadata": longest}).encode(), kind).metadata == longest
    with pytest.raises(WrongBody):
        decode_json(json.dumps(fields | {"metadata": metadata}).encode(), kind)


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_texts_to_be_scored_are_bounded_together(names):
    half = ["a"] * (MAX_INPUTS // 2)
    assert len(ScoreBody(**dict.fromkeys(names, half)).pairs()[0]) == MAX_INPUTS // 2
    with pytest.raises(UserError, match=f"{MAX_INPUTS + 2} texts, more than {MAX_INPUTS}"):
        ScoreBody(**dict.fromkeys(names, [*half, "a"])).pairs()


@pytest.mark.parametrize("kind", dict.fromkeys([*filter(None, (endpoint.body for endpoint in API)), SimpleLine]))
def test_every_list_is_bounded_at_decoding(kind):
    """Lists in JSON schemas, template variables and the like, which may be anything, are bounded by the whole body."""

    def unbounded(node, place):
        if isinstance(node, list):
            return [each for number, part in enumerate(node) for each in unbounded(part, f"{place}.{number}")]
        if not isinstance(node, dict) or (
            "anyOf" in node and "maxItems" in node
        ):  # ``SamplingParams`` bounds the latter
            return []
        here = [place] if node.get("type") == "array" and "maxItems" not in node else []
        return here + [each for key, part in node.items() for each in unbounded(part, f"{place}.{key}")]

    assert unbounded(msgspec.json.schema(kind), "$") == []
