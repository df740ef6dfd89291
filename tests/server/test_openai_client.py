"""Models, chats and completions through OpenAI's own client, which checks each answer against its own types."""

from __future__ import annotations

import json

import openai
import pytest

from labinfer.requests.protocol import NEUTRAL_VALUES

MESSAGES = [{"role": "user", "content": "17 + 25 = ?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class TestModels:
    def test_list_has_the_model(self, client):
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").object == "model"

    def test_another_one_is_not_found(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-4")
        assert caught.value.code == "model_not_found"


class TestChat:
    def test_answer(self, client):
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=16)
        assert answer.choices[0].message.content == "42"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.id.startswith("chatcmpl-")

    def test_stream_joins_to_the_same(self, client):
        fields = {"model": "demo", "messages": MESSAGES, "temperature": 1.2, "seed": 3, "max_tokens": 30, "n": 2}
        whole = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        texts = ["", ""]
        reasons: list[list[str]] = [[], []]
        for chunk in chunks[:-1]:
            assert chunk.usage is None
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index].append(choice.finish_reason)
        assert texts == [choice.message.content for choice in whole.choices]
        assert reasons == [[choice.finish_reason] for choice in whole.choices]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1

    def test_role_comes_with_the_first_token(self, client):
        fields = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 16, "n": 2, "stream": True}
        roles: list[list[str | None]] = [[], []]
        for chunk in client.chat.completions.create(**fields):
            for choice in chunk.choices:
                roles[choice.index].append(choice.delta.role)
                assert choice.delta.content or choice.finish_reason, "no chunk before there is something to say"
        assert all(found[0] == "assistant" and not any(found[1:]) for found in roles)

    def test_answer_goes_on_in_the_last_message(self, client):
        begun = {"role": "assistant", "content": "4"}
        answer = client.chat.completions.create(
            model="demo",
            messages=[*MESSAGES, begun],
            temperature=0,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert answer.choices[0].message.content == "2"

    def test_special_tokens_show_where_that_is_asked_for(self, client):
        fields = {"model": "demo", "prompt": "red", "max_tokens": 2, "temperature": 0}
        for skip, expected in ((True, ""), (False, "<|im_start|>" * 2)):
            extra = {"skip_special_tokens": skip, "allowed_token_ids": [1]}
            assert client.completions.create(**fields, extra_body=extra).choices[0].text == expected

    def test_older_functions_are_answered_in_their_form(self, client):
        fields = {"model": "demo", "messages": MESSAGES, "temperature": 1.0, "seed": 5, "max_tokens": 300}
        fields |= {"functions": [TOOLS[0]["function"]], "function_call": {"name": "get_weather"}}
        choice = client.chat.completions.create(**fields).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
        call = choice.message.function_call
        assert call.name == "get_weather" and json.loads(call.arguments)["days"] in (1, 2, 3)
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
        (streamed,) = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
        assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
        assert chunks[-1].finish_reason == "function_call"
        result = {"role": "function", "name": "get_weather", "content": "sunny"}
        past = {"role": "assistant", "content": None, "function_call": call.model_dump()}
        answer = client.chat.completions.create(**fields | {"messages": [*MESSAGES, past, result], "max_tokens": 300})
        assert answer.choices[0].message.function_call

    def test_schema_that_no_grammar_holds_is_left_out_with_a_warning(self, client):
        schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields = {"model": "demo", "messages": MESSAGES, "temperature": 1.0, "seed": 1, "max_tokens": 40}
        raw = client.chat.completions.with_raw_response.create(**fields, response_format=form)
        assert "cannot enforce uniqueItems" in raw.headers["x-warning"]
        assert len(json.loads(raw.parse().choices[0].message.content)) == 2
        form["json_schema"]["strict"] = True
        with pytest.raises(openai.BadRequestError, match="cannot enforce uniqueItems"):
            client.chat.completions.create(**fields, response_format=form)

    @pytest.mark.parametrize("num_tokens", [2048, 2049, 5000])
    def test_prompt_that_is_too_long_has_openais_code_and_sentence(self, client, num_tokens):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="demo", prompt=[5] * num_tokens, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.body["message"].startswith("This model's maximum context length is 2048 tokens. However, ")

    def test_chinese_is_never_cut_in_a_character(self, client):
        fields = {"model": "demo", "messages": [{"role": "user", "content": "你好"}], "temperature": 1.5, "seed": 1}
        whole = client.chat.completions.create(**fields, max_tokens=60)
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**fields, max_tokens=60, stream=True)
        ]
        assert "".join(pieces) == whole.choices[0].message.content

    def test_log_probabilities(self, client):
        fields = {"model": "demo", "messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        answer = client.chat.completions.create(**fields, max_tokens=5)
        content = answer.choices[0].logprobs.content
        assert len(content) == answer.usage.completion_tokens
        assert all(one.logprob <= 0 and len(one.top_logprobs) == 3 for one in content)
        streamed = [
            one
            for chunk in client.chat.completions.create(**fields, max_tokens=5, stream=True)
            for choice in chunk.choices
            if choice.logprobs
            for one in choice.logprobs.content
        ]
        assert [one.token for one in streamed] == [one.token for one in content]

    def test_prompts_log_probabilities_have_vllms_shape_and_place(self, client, server):
        fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, "n": 2, "temperature": 1.0}
        fields["extra_body"] = {"prompt_logprobs": 2}
        whole = client.chat.completions.create(**fields)
        ids = server.post("/tokenize", {"messages": MESSAGES})[1]["tokens"]
        first, *others = whole.prompt_logprobs
        assert first is None and len(whole.prompt_logprobs) == len(ids) == whole.usage.prompt_tokens
        for token_id, entry in zip(ids[1:], others, strict=True):
            own = entry[str(token_id)]
            assert own.keys() == {"logprob", "rank", "decoded_token"}
            assert {one["rank"] for one in entry.values()} == {1, 2, own["rank"]}
            ranked = sorted(entry.values(), key=lambda one: one["rank"])
            assert ranked == sorted(entry.values(), key=lambda one: -one["logprob"])
        assert not hasattr(whole.choices[0], "prompt_logprobs")
        chunks = list(client.chat.completions.create(**fields, stream=True))
        (streamed,) = [chunk.prompt_logprobs for chunk in chunks if hasattr(chunk, "prompt_logprobs")]
        assert [entry and entry.keys() for entry in streamed] == [
            entry and entry.keys() for entry in whole.prompt_logprobs
        ]

    def test_usage_may_come_with_every_chunk(self, client, lenient):
        fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 6, "temperature": 1.5, "seed": 1}
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1].usage.completion_tokens == counts[-2] > 1
        completion = {"model": "demo", "prompt": "red", "max_tokens": 3, "extra_body": {"ignore_eos": True}}
        del options["include_usage"]  # by vLLM's default it goes with the others
        pieces = list(lenient.completions.create(**completion, stream=True, stream_options=options))
        assert [piece.usage.completion_tokens for piece in pieces[-2:]] == [3, 3] and not pieces[-1].choices
        options["include_usage"] = False
        for create, asked in ((lenient.completions.create, completion), (client.chat.completions.create, fields)):
            pieces = list(create(**asked, stream=True, stream_options=options))
            assert all(piece.choices and piece.usage is None for piece in pieces)

    def test_message_says_that_nothing_was_refused(self, client):
        fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, "logprobs": True}
        whole = client.chat.completions.create(**fields).choices[0]
        assert whole.message.to_dict()["refusal"] is None and whole.logprobs.to_dict()["refusal"] is None
        deltas = [chunk.choices[0].delta.to_dict() for chunk in client.chat.completions.create(**fields, stream=True)]
        assert deltas[0]["refusal"] is None and not any("refusal" in delta for delta in deltas[1:])
        again = [*MESSAGES, whole.message.to_dict(), {"role": "user", "content": "And?"}]
        assert client.chat.completions.create(**fields | {"messages": again}).choices[0].message.content is not None

    @pytest.mark.parametrize("kind", ["json_object", "json_schema"])
    def test_schema_may_stand_in_the_format_itself(self, client, kind):
        """As llama.cpp and Together have it."""
        schema = {"type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"]}
        schema["additionalProperties"] = False
        fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 40}
        answer = client.chat.completions.create(
            **fields, extra_body={"response_format": {"type": kind, "schema": schema}}
        )
        assert json.loads(answer.choices[0].message.content) == {"ok": True}
        text = {"format": {"type": "json_object", "schema": schema}}
        response = client.responses.create(model="demo", input="hi", max_output_tokens=40, extra_body={"text": text})
        assert json.loads(response.output_text) == {"ok": True}

    def test_what_other_clients_send_changes_nothing(self, client):
        fields = {"model": "demo", "temperature": 0, "max_tokens": 8}
        system = {"role": "system", "content": "Be short."}
        plain = client.chat.completions.create(messages=[system, *MESSAGES], **fields)
        extra = dict.fromkeys(NEUTRAL_VALUES) | {
            "logprobs": False,
            "top_logprobs": 0,
            "tools": [],
            "tool_choice": "auto",
            "stop": [],
            "stream_options": None,
            "modalities": ["text"],
            "seed": -5,
        }
        part = {"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}}
        developer = {"role": "developer", "content": "Be short."}
        other = client.chat.completions.create(
            messages=[developer, {"role": "user", "content": [part]}], **fields, extra_body=extra
        )
        assert other.choices[0] == plain.choices[0]
        assert other.usage.prompt_tokens == plain.usage.prompt_tokens

    def test_stop_string(self, client):
        fields = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
        text = client.chat.completions.create(**fields, max_tokens=40).choices[0].message.content
        stop = text[len(text) // 2 :][:3]
        cut = client.chat.completions.create(**fields, max_tokens=40, stop=[stop])
        assert cut.choices[0].message.content == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"

    def test_json_by_a_schema(self, client):
        answer = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            temperature=1.5,
            seed=1,
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            },
        )
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 99

    def test_regex_and_a_choice(self, client):
        for form, allowed in (({"regex": "(yes|no){2}"}, None), ({"choice": ["red", "green"]}, ("red", "green"))):
            answer = client.chat.completions.create(
                model="demo", messages=MESSAGES, temperature=1.0, extra_body={"structured_outputs": form}
            )
            text = answer.choices[0].message.content
            assert text in (allowed or ("yesyes", "yesno", "noyes", "nono"))

    def test_forced_tool_call(self, client):
        fields = {
            "model": "demo",
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "temperature": 1.0,
            "seed": 5,
            "max_tokens": 300,
        }
        answer = client.chat.completions.create(**fields)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["days"] in (1, 2, 3)

        name, text, reasons = "", "", []
        for chunk in client.chat.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                for part in choice.delta.tool_calls or []:
                    name += part.function.name or ""
                    text += part.function.arguments or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert (name, json.loads(text), reasons) == ("get_weather", arguments, ["tool_calls"])

    def test_thoughts_come_apart(self, client):
        text = "<think>\nAdd them: 40 < 42.\n</think>\n\n42"
        fields = {"model": "demo", "messages": MESSAGES, "extra_body": {"structured_outputs": {"choice": [text]}}}
        message = client.chat.completions.create(**fields).choices[0].message
        assert (message.content, message.reasoning, message.reasoning_content) == ("42", *["Add them: 40 < 42."] * 2)
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
        for name, expected in (
            ("content", "42"),
            ("reasoning", message.reasoning),
            ("reasoning_content", message.reasoning),
        ):
            assert "".join(getattr(delta, name, None) or "" for delta in deltas) == expected
        past = {"role": "assistant", "content": "42", "reasoning": "Add them."}
        answer = client.chat.completions.create(model="demo", messages=[*MESSAGES, past, *MESSAGES], max_tokens=4)
        assert answer.choices[0].message.content

    def test_call_that_is_cut_off_is_text(self, client):
        text = '<tool_call>\n{"name": "get_weather", "arguments": {"city'
        form = {"structured_outputs": {"choice": [text]}}
        fields = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "extra_body": form}
        choice = client.chat.completions.create(**fields).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == text

    def test_tools_own_answer_goes_on(self, client):
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        }
        messages = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        answer = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, max_tokens=5)
        assert answer.usage.completion_tokens >= 1


class TestCompletions:
    def test_prompts_of_every_kind(self, client):
        ids = client.post("/../tokenize", cast_to=object, body={"prompt": "red blue"})["tokens"]
        for prompt, count in (("red blue", 1), (["red blue", "one"], 2), (ids, 1), ([ids, ids], 2)):
            answer = client.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0, n=2)
            assert [choice.index for choice in answer.choices] == list(range(2 * count))
        one = client.completions.create(model="demo", prompt="red blue", max_tokens=4, temperature=0).choices[0].text
        same = client.completions.create(model="demo", prompt=ids, max_tokens=4, temperature=0).choices[0].text
        assert one == same

    def test_echo_and_log_probabilities(self, lenient):
        fields = {"model": "demo", "prompt": "red blue", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 2}
        choice = lenient.completions.create(**fields).choices[0]
        assert choice.text.startswith("red blue")
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)
        text, tokens, offsets = "", [], []
        for chunk in lenient.completions.create(**fields, stream=True):
            for part in chunk.choices:
                text += part.text
                if part.logprobs:
                    tokens += part.logprobs.tokens
                    offsets += part.logprobs.text_offset
        assert (text, tokens, offsets) == (choice.text, choice.logprobs.tokens, choice.logprobs.text_offset)

    def test_prompt_alone_has_its_log_probabilities(self, lenient):
        fields = {"model": "demo", "prompt": "red blue", "temperature": 0, "echo": True, "logprobs": 1}
        alone = lenient.completions.create(**fields, max_tokens=0)
        more = lenient.completions.create(**fields, max_tokens=1).choices[0].logprobs
        choice = alone.choices[0]
        assert (choice.text, choice.finish_reason, alone.usage.completion_tokens) == ("red blue", "length", 0)
        assert (choice.logprobs.tokens, choice.logprobs.text_offset) == (more.tokens[:-1], more.text_offset[:-1])
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(more.token_logprobs[1:-1], abs=1e-4)
        options = {"include_usage": True}
        *chunks, last = lenient.completions.create(**fields, max_tokens=0, stream=True, stream_options=options)
        (only,) = [chunk.choices[0] for chunk in chunks]
        assert (only.text, only.finish_reason, only.logprobs) == (choice.text, "length", choice.logprobs)
        assert last.usage == alone.usage

    def test_best_of(self, client):
        answer = client.completions.create(model="demo", prompt="red", max_tokens=4, best_of=3, n=2, temperature=1.0)
        assert len(answer.choices) == 2
        with pytest.raises(openai.BadRequestError, match="best_of"):
            client.completions.create(model="demo", prompt="red", best_of=3, n=2, stream=True)

    def test_suffix_is_refused(self, client):
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model="demo", prompt="red", suffix="blue")

    def test_chosen_token_is_among_the_likeliest(self, client):
        fields = {"model": "demo", "prompt": "red blue", "max_tokens": 30, "temperature": 2.0, "seed": 4, "logprobs": 1}
        fields |= {"top_p": 1.0, "extra_body": {"top_k": -1}}  # the model recommends less
        told = client.completions.create(**fields).choices[0].logprobs
        assert all(token in top for token, top in zip(told.tokens, told.top_logprobs, strict=True))
        assert any(len(top) == 2 for top in told.top_logprobs)

    def test_prompts_log_probabilities_come_with_each_first_chunk(self, lenient):
        fields = {"model": "demo", "prompt": ["red blue", "one two"], "max_tokens": 3, "n": 2, "temperature": 1.0}
        fields["extra_body"] = {"prompt_logprobs": 1}
        whole = [choice.prompt_logprobs for choice in lenient.completions.create(**fields).choices]
        assert all(whole) and whole[0] == whole[1] != whole[2]
        streamed: dict[int, list] = {}
        for chunk in lenient.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                streamed.setdefault(choice.index, []).append(getattr(choice, "prompt_logprobs", None))
        for index, found in streamed.items():
            assert found[0][0] is whole[index][0] is None
            for told, expected in zip(found[0][1:], whole[index][1:], strict=True):
                # The two prompts share a batch or not, as they come, which tells in the last bits.
                assert told.keys() == expected.keys()
                for token, one in told.items():
                    assert one["decoded_token"] == expected[token]["decoded_token"]
                    assert one["logprob"] == pytest.approx(expected[token]["logprob"], abs=1e-4)
            assert not any(found[1:])

    def test_end_of_sequence_token_goes_by_its_name(self, client):
        messages = "<|im_start|>user\n17 + 25 = ?<|im_end|>\n<|im_start|>assistant\n"
        fields = {"model": "demo", "prompt": messages, "max_tokens": 16, "temperature": 0, "logprobs": 0}
        choice = client.completions.create(**fields).choices[0]
        assert (choice.text, choice.finish_reason, choice.logprobs.tokens[-1]) == ("42", "stop", "<|im_end|>")
        assert choice.logprobs.text_offset[-1] == len(choice.text)
