"""``/v1/responses`` through OpenAI's own client, which checks answers and events against its own types."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from serving import Server, serving

QUESTION = "17 + 25 = ?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
OTHER_TOOL = TOOL | {"name": "get_time"}
KEYS = ("key-of-the-first", "key-of-the-second")


class Person(pydantic.BaseModel):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@pytest.fixture(scope="module")
def server():
    keys = [argument for key in KEYS for argument in ("--api-key", key)]
    with serving("--dtype", "float32", "--num-kv-blocks", "1024", *keys) as server:
        yield server
        assert "Traceback" not in server.text


def make_client(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=60, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return make_client(server, KEYS[0])


@pytest.fixture(scope="module")
def create(client):
    def create(input: Any = QUESTION, **fields):
        return client.responses.create(model="demo", input=input, **({"temperature": 0} | fields))

    return create


def choice(text: str) -> dict[str, Any]:
    """The body's field that makes the model write this."""
    return {"structured_outputs": {"choice": [text]}}


def without_ids(response) -> list[dict[str, Any]]:
    items = [item.model_dump() for item in response.output]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def check_events(events: list) -> None:
    """Events come in the order of OpenAI's, each with its number, and those of an item together."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    open_item = None
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None
            open_item = (event.item.id, event.output_index)
        elif event.type == "response.output_item.done":
            assert (event.item.id, event.output_index) == open_item
            open_item = None
        else:
            assert (event.item_id, event.output_index) == open_item
    assert open_item is None
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


class TestAnswers:
    def test_text_is_answered(self, create):
        response = create(instructions="Add.", metadata={"a": "b"}, user="me")
        assert (response.output_text, response.status, response.metadata) == ("42", "completed", {"a": "b"})
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        assert response.id.startswith("resp_")

    def test_items_are_the_conversation_of_a_chat(self, client, create):
        items = [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hi", "annotations": []}],
            },
            {"role": "user", "content": QUESTION},
        ]
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": QUESTION},
        ]
        chat = client.chat.completions.create(model="demo", messages=messages, temperature=0)
        response = create(items)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        counted = client.responses.input_tokens.count(model="demo", input=items)
        assert counted.input_tokens == chat.usage.prompt_tokens

    def test_stream_comes_to_the_same(self, create):
        fields = {"input": "Count from 1 to 9.", "temperature": 1.2, "max_output_tokens": 30, "extra_body": {"seed": 3}}
        whole, events = create(**fields), list(create(**fields, stream=True))
        check_events(events)
        last = events[-1].response
        assert without_ids(last) == without_ids(whole)
        assert (last.status, last.usage.output_tokens) == (whole.status, whole.usage.output_tokens)
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == whole.output_text and len(texts) > 1

    def test_answer_that_is_cut_off_is_incomplete(self, create):
        fields = {"max_output_tokens": 2, "extra_body": {"ignore_eos": True}}
        response = create(**fields)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[-1].status == "incomplete"
        assert [event.type for event in create(**fields, stream=True)][-1] == "response.incomplete"

    def test_log_probabilities(self, create):
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
        response = create(**fields)
        measured = response.output[0].content[0].logprobs
        assert len(measured) == response.usage.output_tokens
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in measured)
        (done,) = [event for event in create(**fields, stream=True) if event.type == "response.output_text.done"]
        assert [token.token for token in done.logprobs] == [token.token for token in measured]

    def test_thoughts_are_items_of_their_own(self, create):
        fields = {"extra_body": choice("<think>\nAdd them.\n</think>\n\n42"), "reasoning": {"effort": "low"}}
        thought, message = create(**fields).output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Add them.", [])
        assert message.content[0].text == "42"
        events = list(create(**fields, stream=True))
        check_events(events)
        texts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(texts) == "Add them."
        assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0

    def test_form_of_the_text(self, client, create):
        parsed = client.responses.parse(
            model="demo", input=QUESTION, text_format=Person, max_output_tokens=300, temperature=1.0
        )
        assert parsed.status == "incomplete" or isinstance(parsed.output_parsed, Person)
        response = create(text={"format": {"type": "json_object"}, "verbosity": "low"}, max_output_tokens=300)
        assert response.status == "incomplete" or isinstance(json.loads(response.output_text), dict)

    def test_clients_helper_takes_the_stream(self, client):
        with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == "42"


class TestTools:
    FIELDS = {"tools": [TOOL, OTHER_TOOL], "max_output_tokens": 300, "temperature": 1.0}

    @pytest.mark.parametrize(
        "tool_choice",
        [
            {"type": "function", "name": "get_weather"},
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
        ],
        ids=["named", "allowed"],
    )
    def test_call_that_is_forced_comes_and_goes_on(self, create, tool_choice):
        fields = self.FIELDS | {"tool_choice": tool_choice, "parallel_tool_calls": False}
        events = list(create(stream=True, **fields, extra_body={"seed": 5}))
        check_events(events)
        response = events[-1].response
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert call.name == "get_weather"
        assert json.loads(call.arguments)["days"] in (1, 2, 3)
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert (done.item_id, done.arguments) == (call.id, call.arguments)

        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        user = {"role": "user", "content": QUESTION}
        told = [item.model_dump(exclude_none=True) for item in response.output]
        reference = {"type": "item_reference", "id": call.id}
        answers = [
            create([output], previous_response_id=response.id, tools=[TOOL], max_output_tokens=5),
            create([user, *told, output], tools=[TOOL], max_output_tokens=5),
            create([user, reference, output], tools=[TOOL], max_output_tokens=5),
        ]
        assert len({answer.usage.input_tokens for answer in answers}) == 1
        assert len({answer.output_text for answer in answers}) == 1

    def test_call_is_text_where_no_tool_may_be_called(self, create):
        text = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
        for fields in ({"tools": [TOOL], "tool_choice": "none"}, {}):
            assert create(**fields, extra_body=choice(text)).output_text == text


class TestStore:
    def test_response_can_be_looked_up_gone_on_from_and_deleted(self, client, create):
        first = create(instructions="Not carried over.")
        second = create("And 1 + 1?", previous_response_id=first.id)
        assert client.responses.retrieve(second.id) == second
        items = client.responses.input_items.list(second.id, order="asc").data
        assert [(item.role, item.content[0].text) for item in items] == [
            ("user", QUESTION),
            ("assistant", "42"),
            ("user", "And 1 + 1?"),
        ]
        page = client.responses.input_items.list(second.id, limit=1)
        assert page.has_more and page.data == items[-1:]
        assert [item.id for item in page] == [item.id for item in reversed(items)]

        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            create("Further?", previous_response_id=second.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")

    def test_nothing_is_kept_that_is_not_to_be(self, client, create):
        response = create(store=False)
        assert response.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)

    def test_responses_of_another_key_are_not_there(self, server, create):
        response, other = create(), make_client(server, KEYS[1])
        for refused in (
            lambda: other.responses.retrieve(response.id),
            lambda: other.responses.delete(response.id),
            lambda: other.responses.input_items.list(response.id),
            lambda: other.responses.cancel(response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        for fields in (
            {"input": "x", "previous_response_id": response.id},
            {"input": [{"type": "item_reference", "id": response.output[0].id}]},
        ):
            with pytest.raises(openai.BadRequestError):
                other.responses.create(model="demo", **fields)

    def test_one_id_twice_is_no_response_behind_itself(self, create):
        headers = {"x-request-id": "same"}
        first = create(extra_headers=headers)
        second = create("x", extra_headers=headers, previous_response_id=first.id, max_output_tokens=2)
        assert first.id == "resp_same" != second.id

    @pytest.mark.parametrize("by_its_own", [True, False])
    def test_response_whose_id_is_another_than_was_chosen_is_cancelled(self, server, create, by_its_own):
        headers = {"x-request-id": "again"}
        create(extra_headers=headers)
        endless = {"ignore_eos": True, "min_tokens": 1500}
        stream = create("x", extra_headers=headers, extra_body=endless, max_output_tokens=1500, stream=True)
        begun = next(stream)
        assert begun.response.id != "resp_again"
        id = begun.response.id if by_its_own else "again"
        assert server.post(f"/v1/requests/{id}/cancel", b"", KEYS[1])[0] == 404
        assert server.post(f"/v1/requests/{id}/cancel", b"", KEYS[0])[0] == 200
        assert [event.type for event in stream][-1] == "response.failed"


REFUSED = [
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": []}, "input"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"text": {"format": {"type": "grammar"}}}, "text"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_is_not_offered_is_refused_by_name(create, fields, param):
    fields = dict(fields)
    with pytest.raises(openai.BadRequestError) as caught:
        create(fields.pop("input", QUESTION), extra_body=fields)
    assert caught.value.param == param, caught.value.message
