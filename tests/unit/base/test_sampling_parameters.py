"""Parameters of plugins' logits processors: in SamplingParams, requests, flags and the API's document, and what is refused."""

from __future__ import annotations

import argparse
import json
import math

import msgspec
import pytest

from labinfer.api.batch.fingerprint import options_fingerprint
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.base.sampling_params import SamplingParameter, SamplingParams
from labinfer.cli.flags import build_parser
from labinfer.cli.own_options import sampling_options
from labinfer.cli.terminal.conversation import Conversation
from labinfer.requests.anthropic.message_body import MessageBody
from labinfer.requests.json_decode import WrongBody, decode_json
from labinfer.requests.jsonl import SimpleLine, parse_line
from labinfer.requests.openai.response_body import CountBody, ResponseBody
from labinfer.requests.protocol import ChatBody, CompletionBody
from labinfer.requests.recommended_sampling import recommended_sampling
from labinfer.server.gateway.endpoints import API
from labinfer.server.gateway.openapi import describe_api
from labinfer.server.gateway.refusals import refused_field

WIDTH = SamplingParameter(default=0.0, least=0.0, most=9.0, help="how wide")
COUNT = SamplingParameter(default=3, least=1, most=8, help="how many")
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    SimpleLine: {"prompt": "hi"},
    CompletionBody: {"prompt": "hi"},
    ChatBody: MESSAGES,
    ResponseBody: {"input": "hi"},
    MessageBody: MESSAGES | {"max_tokens": 3},
}


@pytest.fixture
def parameters(add_part):
    for name, parameter in (("width", WIDTH), ("count", COUNT)):
        add_part("logits_processor", name, lambda logits_V, value, row: None, parameter=parameter)
    add_part("logits_processor", "free", lambda logits_V, value, row: None)


def processors(**fields) -> dict:
    return SamplingParams(**fields).logits_processors


def test_keyword_of_sampling_params(parameters):
    assert processors(width=2) == {"width": 2.0} and type(processors(width=2)["width"]) is float
    assert processors(logits_processors={"width": 2, "free": "x"}, count=4.0) == {"width": 2.0, "free": "x", "count": 4}
    assert processors(width=0, count=3) == {}, "with its default a processor is not called"
    assert msgspec.structs.replace(SamplingParams(width=2), max_tokens=3).logits_processors == {"width": 2.0}
    data = msgspec.msgpack.encode(SamplingParams(width=2, count=4))
    assert msgspec.msgpack.decode(data, type=SamplingParams) == SamplingParams(width=2, count=4)


def test_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="width"):
        SamplingParams(width=2)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"width": -1}, "width must be from 0 to 9, not -1"),
        ({"width": 9.5}, "width must be from 0 to 9, not 9.5"),
        ({"width": math.nan}, "width must be from 0 to 9, not nan"),
        ({"width": "2"}, "width must be a number, not '2'"),
        ({"width": True}, "width must be a number, not True"),
        ({"count": 2.5}, "count must be a whole number, not 2.5"),
        ({"logits_processors": {"width": None}}, "width must be a number, not None"),
        ({"logits_processors": [1], "width": 2}, r"logits_processors must map names to arguments, not \[1\]"),
    ],
)
def test_wrong_value_is_refused(fields, text, parameters):
    with pytest.raises(UserError, match=f"^{text}") as caught:
        SamplingParams(**fields)
    assert refused_field(caught.value).param == text.split()[0]


def test_defaults_and_a_request_are_joined(parameters):
    defaults = SamplingParams(width=2, count=4)
    assert defaults.updated({"logits_processors": {"width": 5, "free": 1}}) == SamplingParams(
        logits_processors={"width": 5, "count": 4, "free": 1}
    )
    assert defaults.updated({"logits_processors": {"width": 0}}) == SamplingParams(count=4)
    assert defaults.updated({"seed": 2**63 + 5}) == SamplingParams(width=2, count=4, seed=5)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_field_of_bodies_and_lines(kind, parameters):
    def given(**fields):
        return decode_json(json.dumps(BODIES[kind] | fields).encode(), kind).logits_processors

    assert given() is None
    assert given(width=2) == {"width": 2}
    assert given(width=2, count=None, logits_processors={"free": 1}) == {"width": 2, "free": 1}
    assert given(count=5.0, logits_processors=None) == {"count": 5}
    with pytest.raises(WrongBody, match="unknown field `witdh`; did you mean 'width'"):
        given(witdh=2)
    with pytest.raises(WrongBody, match="Expected `object"):
        given(width=2, logits_processors=[1])


def test_field_is_unknown_where_nothing_is_sampled(parameters):
    with pytest.raises(WrongBody, match="unknown field `width`"):
        decode_json(b'{"input": "hi", "width": 2}', CountBody)


def test_unknown_field_is_refused_without_the_plugin():
    with pytest.raises(WrongBody, match="unknown field `width`"):
        decode_json(b'{"prompt": "hi", "width": 2}', SimpleLine)


def test_line_overrides_the_command_line(parameters):
    defaults = SamplingParams(width=2, count=4)
    line = {"prompt": "hi", "width": 0, "n": 2}
    assert parse_line(json.dumps(line).encode(), defaults).sampling == SamplingParams(count=4, n=2)
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "width": 3}}
    assert parse_line(json.dumps(body).encode(), defaults).sampling == SamplingParams(width=3, count=4)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_flag_of_commands_that_sample(command, parameters):
    parser = build_parser(command)
    assert "how wide (default: 0.0)" in parser.format_help()
    given, sampling = sampling_options(parser.parse_args(["--width", "2.5", "--count", "4"]))
    assert given == {"width": 2.5, "count": 4} and sampling == SamplingParams(width=2.5, count=4)
    with pytest.raises(UserError, match="--width must be from 0 to 9, not 10"):
        sampling_options(parser.parse_args(["--width", "10"]))
    with pytest.raises(UserError, match="--count must be a whole number, not '1.5'"):
        sampling_options(parser.parse_args(["--count", "1.5"]))


@pytest.mark.parametrize("command", ["serve", "plan", "bench serve"])
def test_other_commands_have_no_such_flag(command, parameters):
    with pytest.raises(UserError, match="unknown option --width"):
        build_parser(command).parse_args(["--width", "2"])


def test_flag_that_there_is_already_is_refused(add_part):
    add_part("logits_processor", "threads", print, parameter=COUNT)
    with pytest.raises(UserError, match="a plugin adds a flag that already exists: .*--threads"):
        build_parser("generate")
    assert isinstance(build_parser("serve"), argparse.ArgumentParser)


def test_setting_of_a_chat(parameters):
    conversation = Conversation()
    conversation.set("width", "2.5")
    assert conversation.settings == {"width": 2.5}
    with pytest.raises(UserError, match="width must be from 0 to 9"):
        conversation.set("width", "10")
    with pytest.raises(UserError, match="count must be a whole number, not 'two'"):
        conversation.set("count", "two")


def test_job_is_known_by_the_value(parameters):
    def written(**fields) -> dict:
        return options_fingerprint(EngineOptions.from_flat({}), SamplingParams(**fields))

    assert written(width=2)["--width"] == 2.0 and "--width" not in written(width=0)
    assert written(width=2)["--logits-processors"] == written()["--logits-processors"] == {}


def test_checkpoint_may_recommend_a_value(tmp_path, parameters):
    (tmp_path / "generation_config.json").write_text('{"width": 2, "temperature": 0.5}')
    assert recommended_sampling(tmp_path) == {"width": 2, "temperature": 0.5}


@pytest.mark.parametrize("body", ["CompletionBody", "ChatBody", "ResponseBody", "MessageBody"])
def test_field_in_the_document(body, parameters):
    properties = describe_api(API, ["demo"], 10)["components"]["schemas"][body]["properties"]
    bounds = {"minimum": 0.0, "maximum": 9.0, "default": None}
    assert properties["width"] == bounds | {"type": ["number", "null"], "description": "how wide"}
    assert properties["count"]["type"] == ["integer", "null"] and "free" not in properties


@pytest.mark.parametrize(
    ("name", "details", "text"),
    [
        ("temperature", {}, "requests already have a field with this name"),
        ("messages", {"parameter": WIDTH}, "requests already have a field with this name"),
        ("input", {"parameter": WIDTH}, "requests already have a field with this name"),
        ("max-width", {"parameter": WIDTH}, "a parameter name must consist of lower-case letters"),
        ("width", {"parameter": 3}, "parameter must be a SamplingParameter, not 3"),
        ("width", {"bounds": 3}, "'bounds' is not a detail of this kind, which has: parameter"),
    ],
)
def test_wrong_registration_is_refused(name, details, text):
    with pytest.raises(UserError, match=f"register\\('logits_processor', '{name}'\\): {text}"):
        REGISTRY.register("logits_processor", name, **details)(lambda logits_V, value, row: None)
    assert name not in REGISTRY.names("logits_processor")


def test_name_without_a_parameter_may_be_a_field_of_bodies():
    with pytest.raises(ZeroDivisionError), REGISTRY.registering_for("test"):
        REGISTRY.register("logits_processor", "stream")(lambda logits_V, value, row: None)
        1 / 0  # noqa: B018 - takes the registration back


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"default": "1"}, "must be an int or a float, not '1'"),
        ({"default": True}, "must be an int or a float, not True"),
        ({"default": 10}, "the default of a sampling parameter must be from 0 to 9, not 10"),
        ({"default": math.nan}, "the default of a sampling parameter must be"),
        ({"default": None}, "must be an int or a float, not None"),
        ({"most": math.inf}, "cannot have bounds from 0.0 to inf"),
        ({"least": 10}, "cannot have bounds from 10 to 9.0"),
    ],
)
def test_parameter_that_makes_no_sense_is_refused(changes, text):
    fields = {"default": 0.0, "least": 0.0, "most": 9.0, "help": "x"}
    with pytest.raises(UserError, match=text):
        SamplingParameter(**fields | changes)


@pytest.mark.parametrize(("name", "default"), [("max_tokens", 128), ("seed", 0), ("temperature", 0.0)])
def test_number_that_is_none_names_the_default(name, default):
    with pytest.raises(
        UserError, match=f"^{name} must be a number, not None; leave it out for the default, {default}$"
    ):
        SamplingParams(**{name: None})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("guided_decoding", "structured_outputs"),
        ("use_beam_search", "num_beams"),
        ("max_completion_tokens", "max_tokens"),
        ("extra_args", "logits_processors, by the name of a plugin's"),
    ],
)
def test_keyword_of_vllm_leads_to_a_field(name, field):
    with pytest.raises(TypeError, match=f"no field '{name}'; did you mean {field}\\?$"):
        SamplingParams(**{name: True})
