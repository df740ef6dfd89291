"""Requests that are refused, with the error objects that OpenAI's own client reads."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [{"role": "user", "content": "17 + 25 = ?"}]
WITHOUT_END = {"allOf": [{"type": "string", "pattern": f"a{{{number},900}}.*b"} for number in range(1, 40)]}
"""llguidance alone would compile it for minutes."""


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"top_p": 0}, "top_p"),
            ({"n": 1000}, "n"),
            ({"logit_bias": {"99999999": 1}}, "logit_bias"),
            ({"stop": ["a"] * 100}, "stop"),
            ({"stop": ""}, "stop"),
            ({"bad_words": [""]}, "bad_words"),
            ({"suffix": "x"}, "suffix"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"reasoning_effort": "huge"}, "reasoning_effort"),
            ({"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
            ({"functions": [{"nam": "f"}]}, "nam"),
            ({"documents": [{"text": "x"}]}, "documents"),
            ({"echo": True}, "echo"),
            ({"messages": [{"role": "User", "content": "hi"}]}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
            ({"nonsense": 1}, "nonsense"),
            ({"messages": []}, "messages"),
            ({"messages": "hello"}, "messages"),
            ({"messages": [{"role": "user", "content": "a" * 200_000}]}, None),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
                None,
            ),
            ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
            ({"structured_outputs": {"json": WITHOUT_END}}, "structured_outputs"),
            ({"tool_choice": "required"}, "tool_choice"),
        ],
    )
    def test_poison_is_a_400(self, client, fields, param):
        body = {"model": "demo", "messages": MESSAGES, "max_tokens": 4} | fields
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.post("/chat/completions", cast_to=object, body=body | {"stream": stream})
            assert caught.value.body["type"] == "invalid_request_error"
            if param:
                assert caught.value.body["param"] == param

    @pytest.mark.parametrize("depth", [65, 200, *range(900, 1010, 10), 100_000])
    def test_what_is_nested_too_deeply(self, server, depth):
        deep = b'{"x": ' * (depth - 1) + b"{}" + b"}" * (depth - 1)
        status, answer = server.post("/v1/completions", b'{"prompt": "red", "logits_processors": ' + deep + b"}")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    @pytest.mark.parametrize("stream", [False, True])
    def test_max_tokens_beyond_the_context(self, client, server, stream):
        """Without it the answer has what fits."""
        fields = {"model": "demo", "messages": MESSAGES, "stream": stream}
        numbers = (
            r"max_tokens 2048 is too large. This model's maximum context length is 2048 tokens and your prompt has \d+"
        )
        with pytest.raises(openai.BadRequestError, match=numbers) as caught:
            client.chat.completions.create(**fields, max_tokens=2048)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError, match="max_completion_tokens 9999 is too large") as caught:
            client.chat.completions.create(**fields, max_completion_tokens=9999)
        assert caught.value.param == "max_completion_tokens"
        prompt = {"model": "demo", "prompt": [5] * 2040, "stream": stream, "ignore_eos": True}
        assert server.post("/v1/completions", prompt | {"max_tokens": 8})[0] == 200
        assert server.post("/v1/completions", prompt)[0] == 200
        assert server.post("/v1/completions", prompt | {"max_tokens": 0, "echo": True})[0] == 200
        status, answer = server.post("/v1/completions", prompt | {"max_tokens": 9})
        assert (status, answer["error"]["param"]) == (400, "max_tokens") and "2040, so that 8 fit" in str(answer)

    @pytest.mark.parametrize(
        ("fields", "message", "param"),
        [
            ({"response_format": {"type": "json_object", "schema": {"enum": []}}}, "response_format: the schema", None),
            (
                {
                    "tools": [
                        {
                            "type": "function",
                            "function": {"name": "f", "parameters": {"properties": {"x": False}, "required": ["x"]}},
                        }
                    ],
                    "tool_choice": "required",
                },
                "tools: the schema",
                None,
            ),
            ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json", "structured_outputs"),
        ],
    )
    def test_schema_that_has_no_value_is_refused_by_the_fields_name(self, server, fields, message, param):
        status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES} | fields)
        error = answer["error"]
        assert status == 400 and error["message"].startswith(f"{message} is refused"), error
        assert error["param"] == (param or next(iter(fields)))

    def test_constraints_that_allow_no_token(self, server):
        body = {"prompt": "red", "allowed_token_ids": [60], "bad_words": [], "min_tokens": 0, "max_tokens": 4}
        status, answer = server.post("/v1/completions", body | {"allowed_token_ids": [2], "min_tokens": 2})
        assert (status, answer["error"]["param"]) == (400, "allowed_token_ids"), answer
        (seven,) = server.post("/tokenize", {"prompt": "7", "add_special_tokens": False})[1]["tokens"]
        body |= {"allowed_token_ids": [seven], "bad_words": ["777"]}
        status, answer = server.post("/v1/completions", body)
        assert status == 400 and "allow no token after 2 output tokens" in answer["error"]["message"]
        stream = server.stream(body).finish()
        assert stream.text == "77" and "the output was aborted" in stream.error["message"]

    def test_stream_options_without_a_stream(self, client):
        body = {"model": "demo", "messages": MESSAGES, "stream_options": {"include_usage": True}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/chat/completions", cast_to=object, body=body)
        assert caught.value.param == "stream_options"

    def test_part_that_is_no_text_is_named(self, client):
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError, match="models read text only"):
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [part]}])

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b'{"messages": NaN}'])
    def test_what_is_no_json(self, server, body):
        status, answer = server.post("/v1/chat/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    def test_another_model(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="../demo", messages=MESSAGES)
        assert caught.value.code == "model_not_found"

    def test_too_large_a_body(self, server):
        status, answer = server.post("/v1/completions", {"prompt": "a" * (1 << 20)})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")

    def test_no_such_path_and_method(self, server):
        assert server.get("/v1/nothing")[0] == 404
        status, answer = server.get("/v1/chat/completions")
        assert status == 405
        assert "POST" in answer["error"]["message"]

    def test_engine_is_idle_after_all_that(self, server):
        server.wait_idle()
