"""Embeddings on their way out: length 1, OpenAI's response, and the body that asks for them."""

from __future__ import annotations

import base64
import json
import math
from types import SimpleNamespace

import msgspec
import numpy
import pytest

from labinfer.api.batch.records import embedding_record
from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput, PoolingConfig
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.jsonl import parse_line
from labinfer.requests.openai.embeddings import embedding_list
from labinfer.requests.outputs import RequestState
from labinfer.requests.prompts import TextPrompt, parse_prompt
from labinfer.requests.protocol import EMBEDDINGS_URL, MAX_INPUTS, MAX_TOKEN_IDS, EmbeddingBody
from labinfer.server.link.frames import Add, FromGateway, FromHost, Updates
from labinfer.server.link.framing import FrameReader, pack


def output(*numbers: float, num_tokens: int = 2) -> EmbeddingOutput:
    return EmbeddingOutput("key", list(range(num_tokens)), list(numbers), 0)


# Vectors.


def test_output_is_made_of_the_one_update():
    update = AnswerUpdate(index=0, finish_reason=FinishReason.STOP, num_cached_tokens=4, embedding=[1.0, 2.0])
    opened = RequestState(
        Request(key="mine", prompt_token_ids=[7, 8, 9], sampling=SamplingParams(), pooling="last"), None, streams=False
    )
    assert not opened.is_done
    assert opened.add(update) is False and opened.is_done
    assert opened.output() == EmbeddingOutput("mine", [7, 8, 9], [1.0, 2.0], 4)
    assert opened.first_token_time == 0 == opened.num_output_tokens


def test_pooled_request_and_its_vector_pass_between_gateway_and_rank_0():
    request = Request(key="id/0", prompt_token_ids=[7, 8], sampling=SamplingParams(), pooling="mean")
    assert FrameReader(FromGateway).feed(pack(Add("m", request))) == [Add("m", request)]
    vector = numpy.random.default_rng(0).standard_normal(1000).astype(numpy.float32).tolist()
    updates = Updates([("id/0", AnswerUpdate(index=0, finish_reason=FinishReason.STOP, embedding=vector))])
    assert FrameReader(FromHost).feed(pack(updates)) == [updates]


@pytest.mark.parametrize("numbers", [(3.0, -4.0), (1e-30, 1e-30), (1e30, -2e30, 3e30), (5.0,)])
def test_normalized_vectors_have_length_1_and_their_direction(numbers):
    vector = output(*numbers).normalized().embedding
    assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-12)
    assert [number / vector[0] for number in vector] == pytest.approx([number / numbers[0] for number in numbers])


def test_zeros_stay_zeros():
    assert output(0.0, 0.0).normalized().embedding == [0.0, 0.0]


# OpenAI's response.


def test_response_of_numbers():
    model = SimpleNamespace(pooling=PoolingConfig(), hidden_size=2, max_model_len=64)
    outputs = body(input=["a", "b"]).embedding(model).outputs([output(3.0, 4.0), output(0.0, -2.0, num_tokens=5)])
    assert msgspec.to_builtins(embedding_list(outputs, "m", "float")) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]},
            {"object": "embedding", "index": 1, "embedding": [0.0, -1.0]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def test_base64_is_little_endian_float32():
    numbers = [0.1, -0.7, 1e-9, 123.456]
    plain = embedding_list([output(*numbers)], "m", "float").data[0].embedding
    encoded = embedding_list([output(*numbers)], "m", "base64").data[0].embedding
    decoded = numpy.frombuffer(base64.b64decode(encoded), dtype="<f4")
    assert decoded.tolist() == numpy.array(plain, dtype=numpy.float32).tolist()


# The body.


def body(**fields) -> EmbeddingBody:
    return msgspec.json.decode(json.dumps(fields).encode(), type=EmbeddingBody)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [{"prompt": "hi"}]),
        (["hi", "你好"], [{"prompt": "hi"}, {"prompt": "你好"}]),
        ([5, 6], [{"prompt_token_ids": [5, 6]}]),
        ([5], [{"prompt_token_ids": [5]}]),
        ([[5, 6], [7]], [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}]),
        (list(range(MAX_INPUTS + 1)), [{"prompt_token_ids": list(range(MAX_INPUTS + 1))}]),
        (["x"] * MAX_INPUTS, [{"prompt": "x"}] * MAX_INPUTS),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_input_is_one_prompt_or_several(given, prompts):
    assert body(input=given).prompts() == [parse_prompt(prompt)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], f"input must have 1 to {MAX_INPUTS} texts or prompts, not 0"),
        (["x"] * (MAX_INPUTS + 1), f"not {MAX_INPUTS + 1}"),
        ("", "input 0 is empty"),
        (["hi", ""], "input 1 is empty"),
        ([[5], []], "input 1 is empty"),
        (["hi", 5], "input mixes"),
        ([5, "hi"], "input mixes"),
        ([[5], "hi"], "input mixes"),
        ([5, [6]], "input mixes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_inputs_that_make_no_sense_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        body(input=given).prompts()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": None},
        {"input": 5},
        {"input": [True]},
        {"input": [1.5]},
        {"input": [["hi"]]},
        {"input": {"text": "hi"}},
        {"input": "hi", "encoding_format": "int8"},
        {"input": "hi", "pooling": "max"},
        {"input": "hi", "pooling": ""},
        {"input": "hi", "dimensions": 0},
        {"input": "hi", "dimensions": "8"},
        {"input": "hi", "temperature": 1.0},
    ],
    ids=str,
)
def test_body_of_other_types_or_fields_is_no_body(fields):
    with pytest.raises(msgspec.ValidationError):
        body(**fields)


@pytest.mark.parametrize(
    ("allowed", "dimensions", "says"),
    [
        ((), 65, "dimensions 65 is not supported: this model's embeddings have 64 dimensions; choose 1 to 64"),
        ((32, 8), 16, "dimensions 16 is not supported: matryoshka_dimensions .*; choose one of 8, 32, 64"),
    ],
)
def test_dimensions_that_the_model_does_not_have_are_refused(allowed, dimensions, says):
    model = SimpleNamespace(pooling=PoolingConfig(matryoshka_dimensions=allowed), hidden_size=64, max_model_len=64)
    for fine in (None, 8, 32, 64):
        body(input="hi", dimensions=fine).embedding(model)
    with pytest.raises(UserError, match=says):
        body(input="hi", dimensions=dimensions).embedding(model)


def test_named_prompt_stands_before_texts():
    model = SimpleNamespace(
        pooling=PoolingConfig(prompts={"query": "Q: ", "document": ""}), hidden_size=64, max_model_len=64
    )
    work = body(input=["a", "b"], prompt_name="query").embedding(model)
    assert work.prompts() == [TextPrompt("Q: a"), TextPrompt("Q: b")]
    assert body(input="a", prompt_name="document").embedding(model).prompts() == [TextPrompt("a")]
    with pytest.raises(UserError, match="prompt_name 'other' is unknown: choose one of query, document"):
        body(input="a", prompt_name="other").embedding(model)
    with pytest.raises(UserError, match="prompt_name needs texts"):
        body(input=[5, 6], prompt_name="query").embedding(model).prompts()
    bare = SimpleNamespace(pooling=PoolingConfig(), hidden_size=64, max_model_len=64)
    with pytest.raises(UserError, match="prompt_name 'query' is unknown: the model's files have no prompts"):
        body(input="a", prompt_name="query").embedding(bare)


def test_schema_says_what_an_input_may_be():
    (_,), schemas = msgspec.json.schema_components([EmbeddingBody])
    schema = schemas["EmbeddingBody"]
    assert schema["required"] == ["input"] and schema["additionalProperties"] is False
    kinds = schema["properties"]["input"]["oneOf"]
    assert [(kind["type"], kind.get("items", {}).get("type"), kind.get("maxItems")) for kind in kinds] == [
        ("string", None, None),
        ("array", "string", MAX_INPUTS),
        ("array", "integer", MAX_TOKEN_IDS),
        ("array", "array", MAX_INPUTS),
    ]


# Batch lines.


def line(**fields) -> bytes:
    return json.dumps({"custom_id": "c-1", "method": "POST", "url": EMBEDDINGS_URL, "body": fields}).encode()


def test_batch_line_carries_the_body():
    parsed = parse_line(line(input=["a", "b"], model="m", user="u", pooling="mean"), SamplingParams(max_tokens=3))
    assert (parsed.custom_id, parsed.url, parsed.model, parsed.user) == ("c-1", EMBEDDINGS_URL, "m", "u")
    assert (parsed.embedding.prompts(), parsed.embedding.pooling) == ([TextPrompt("a"), TextPrompt("b")], "mean")
    assert parsed.sampling == SamplingParams(), "a pooled request samples nothing"


@pytest.mark.parametrize(("fields", "says"), [({}, "input"), ({"input": "hi", "stop": "x"}, "stop")])
def test_broken_batch_line_is_a_user_error(fields, says):
    with pytest.raises(UserError, match=says):
        parse_line(line(**fields), SamplingParams())


def test_output_line_has_openais_batch_shape():
    parsed = parse_line(line(input="hi", encoding_format="base64"), SamplingParams())
    outputs = [output(3.0, 4.0)]
    assert embedding_record(7, parsed, outputs, "m") == {
        "id": "batch_req_7",
        "custom_id": "c-1",
        "response": {
            "status_code": 200,
            "request_id": "req_7",
            "body": msgspec.to_builtins(embedding_list(outputs, "m", "base64")),
        },
        "error": None,
    }
