"""Output lines of a batch job: their shape."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from labinfer.api.batch.records import describe_record, error_record, result_record
from labinfer.base.plan import TokenLogprobs
from labinfer.base.sampling_params import SamplingParams
from labinfer.launch.fingerprint import Fingerprint
from labinfer.requests.jsonl import ParsedLine
from labinfer.requests.outputs import Completion, RequestOutput
from labinfer.requests.prompts import ChatPrompt, TextPrompt
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL
from labinfer.text.token_text import make_token_text
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tools import ToolUse
from labinfer.weights.resolve import resolve_model

MIB = 1 << 20
OUTPUT = RequestOutput(
    key=None,
    prompt_token_ids=[1, 2, 3],
    completions=[
        Completion(index=0, text="ho", token_ids=[4, 5], finish_reason="length", stop_reason=None, logprobs=None)
    ],
    prompt_logprobs=None,
    num_cached_tokens=2,
    num_output_tokens=2,
    time_to_first_token=0.1,
    time_per_output_token=0.1,
    total_time=0.2,
)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
}


FINGERPRINT = Fingerprint({"dtype": "float32"}, reproducible=False)


def parsed(**fields) -> ParsedLine:
    prompt = ChatPrompt([]) if fields.get("url") == CHAT_URL else TextPrompt("hi")
    return ParsedLine(**({"prompts": [prompt], "sampling": SamplingParams()} | fields))


# Records.


@pytest.mark.parametrize(("own_id", "expected"), [(None, 7), ("x", "x"), (0, 0)])
def test_simple_result_has_its_own_id_or_its_lines_number(own_id, expected):
    record = result_record(7, parsed(id=own_id), OUTPUT, model="m", fingerprint=FINGERPRINT, tokenizer=None)
    usage = {"id": expected, "text": "ho", "token_ids": [4, 5], "finish_reason": "length", "usage": USAGE}
    assert record == usage


def test_completion_result_has_openais_batch_output_shape():
    record = result_record(
        7,
        parsed(custom_id="c-1", url=COMPLETIONS_URL, model="asked"),
        OUTPUT,
        model="m",
        fingerprint=FINGERPRINT,
        tokenizer=None,
    )
    body = record["response"].pop("body")
    assert record == {
        "id": "batch_req_7",
        "custom_id": "c-1",
        "response": {"status_code": 200, "request_id": "req_7"},
        "error": None,
    }
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": "cmpl-7",
        "object": "text_completion",
        "model": "m",  # that answers, not that which was asked for
        "system_fingerprint": FINGERPRINT.digest,
        "choices": [{"index": 0, "text": "ho", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
    }


def test_chat_result_carries_a_message():
    record = result_record(
        7, parsed(custom_id="c-1", url=CHAT_URL), OUTPUT, model="m", fingerprint=FINGERPRINT, tokenizer=None
    )
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["id"]) == ("chat.completion", "m", "chatcmpl-7")
    message = {"role": "assistant", "content": "ho", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def chat_choice(text: str, finish_reason: str = "stop", **prompt) -> dict:
    line = replace(parsed(custom_id="c-1", url=CHAT_URL), prompts=[ChatPrompt([], ToolUse.from_fields(prompt))])
    output = replace(
        OUTPUT,
        completions=[
            Completion(index=0, text=text, token_ids=[4], finish_reason=finish_reason, stop_reason=None, logprobs=None)
        ],
    )
    tokenizer = Tokenizer(resolve_model("demo", "", may_download=False))
    return result_record(7, line, output, model="m", fingerprint=FINGERPRINT, tokenizer=tokenizer)["response"]["body"][
        "choices"
    ][0]


@pytest.mark.parametrize(("text", "content"), [(PARIS, None), ("Let me look.\n" + PARIS, "Let me look.")])
def test_chat_result_carries_calls_of_the_tools_that_were_offered(text, content):
    choice = chat_choice(text, tools=TOOLS)
    call_id = choice["message"]["tool_calls"][0]["id"]
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": call_id, "type": "function", "function": function}]
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": content, "tool_calls": calls}
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(json.dumps(choice))


def test_call_that_was_cut_off_has_the_arguments_so_far():
    choice = chat_choice(PARIS[: PARIS.index("aris")], "length", tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert call["function"]["arguments"] == '{"city": "P'
    ended = chat_choice(PARIS[:50], "stop", tools=TOOLS)
    assert ended["message"] == {"role": "assistant", "refusal": None, "content": PARIS[:50]}


def test_thoughts_stand_beside_the_content():
    choice = chat_choice("<think>\nAdd them.\n</think>\n\n42", tools=TOOLS)
    thoughts = {"reasoning": "Add them.", "reasoning_content": "Add them."}
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": "42"} | thoughts
    line = parsed(prompts=[ChatPrompt([])])
    completion = replace(OUTPUT.completions[0], text="<think>Add them.</think>42")
    tokenizer = Tokenizer(resolve_model("demo", "", may_download=False))
    record = result_record(
        7, line, replace(OUTPUT, completions=[completion]), model="m", fingerprint=FINGERPRINT, tokenizer=tokenizer
    )
    assert (record["text"], record["reasoning"]) == ("42", "Add them.")
    raw = result_record(
        7, parsed(), replace(OUTPUT, completions=[completion]), model="m", fingerprint=FINGERPRINT, tokenizer=tokenizer
    )
    assert raw["text"] == "<think>Add them.</think>42" and "reasoning" not in raw


def test_parallel_calls_may_be_unwanted():
    both = PARIS + PARIS
    assert len(chat_choice(both, tools=TOOLS)["message"]["tool_calls"]) == 2
    assert len(chat_choice(both, tools=TOOLS, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(("text", "prompt"), [(PARIS, {}), ("No call.\n", {"tools": TOOLS})])
def test_answer_without_calls_is_its_text(text, prompt):
    choice = chat_choice(text, **prompt)
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": text}
    assert choice["finish_reason"] == "stop"


class Letters:
    """A tokenizer whose token 1 is "a", 2 is "b", …"""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token_id - 1) for token_id in token_ids)

    def token_text(self, token_id):
        text = self.decode([token_id])
        return make_token_text(token_id, text, text, text.encode())

    def reply_parser(self, prompt_token_ids, tools, parallel):
        return None


def measured(token_id: int, **top: float) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, {int(key[1:]): value for key, value in top.items()})


def ranked(token_id: int, rank: int, **top: float) -> TokenLogprobs:
    return msgspec.structs.replace(measured(token_id, **top), rank=rank)


SEVERAL = replace(
    OUTPUT,
    completions=[
        Completion(
            index=0,
            text="de",
            token_ids=[4, 5],
            finish_reason="stop",
            stop_reason=5,
            logprobs=[measured(4, t4=-0.5, t6=-1.5), measured(5)],
        ),
        Completion(index=1, text="f", token_ids=[6], finish_reason="length", stop_reason=None, logprobs=[measured(6)]),
    ],
    prompt_logprobs=[ranked(2, 3, t1=-0.25), ranked(3, 9)],
    num_output_tokens=3,
)


def test_simple_result_has_every_answer_and_its_log_probabilities():
    record = result_record(7, parsed(echo=True), SEVERAL, model="m", fingerprint=FINGERPRINT, tokenizer=Letters())
    first = {"token_id": 4, "logprob": -0.5, "top": {4: -0.5, 6: -1.5}}
    assert (record["text"], record["stop_reason"], record["logprobs"][0]) == ("hide", 5, first)
    assert [(one["index"], one["text"], one["token_ids"]) for one in record["choices"]] == [
        (0, "hide", [4, 5]),
        (1, "hif", [6]),
    ]
    b, a = (
        {"logprob": -0.5, "rank": 3, "decoded_token": "b"},
        {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
    )
    assert record["prompt_logprobs"] == [None, {2: b, 1: a}, {3: {"logprob": -0.5, "rank": 9, "decoded_token": "c"}}]
    assert record["usage"]["completion_tokens"] == 3
    assert json.loads(json.dumps(record))


def test_chat_log_probabilities_have_openais_shape():
    choices = result_record(
        7, parsed(custom_id="c", url=CHAT_URL), SEVERAL, model="m", fingerprint=FINGERPRINT, tokenizer=Letters()
    )["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["logprobs"]["content"][0] == {
        "token": "d",
        "logprob": -0.5,
        "bytes": [100],
        "top_logprobs": [
            {"token": "d", "logprob": -0.5, "bytes": [100]},
            {"token": "f", "logprob": -1.5, "bytes": [102]},
        ],
    }


def test_echoed_completion_has_the_prompts_log_probabilities_first():
    line = parsed(custom_id="c", url=COMPLETIONS_URL, echo=True)
    choice = result_record(7, line, SEVERAL, model="m", fingerprint=FINGERPRINT, tokenizer=Letters())["response"][
        "body"
    ]["choices"][0]
    assert choice["text"] == "hide"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d", "e"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"a": -0.25, "b": -0.5}, {"c": -0.5}, {"d": -0.5, "f": -1.5}, {"e": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }


def test_prompt_alone_has_no_answer():
    line = parsed(custom_id="c", url=COMPLETIONS_URL, echo=True, prompt_alone=True)
    body = result_record(7, line, SEVERAL, model="m", fingerprint=FINGERPRINT, tokenizer=Letters())["response"]["body"]
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [("hi", "length")] * 2
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert "stop_reason" not in body["choices"][0] and body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("own_id", "expected"), [(None, 7), ("x", "x"), (0, 0)])
def test_simple_error_names_its_line(own_id, expected):
    error = {"message": "line 7: no", "type": "invalid_request_error", "line": 7}
    assert error_record(7, None, own_id, "no") == {"id": expected, "error": error}


def test_batch_error_answers_400_by_its_custom_id():
    error = {"message": "line 7: no", "type": "invalid_request_error", "param": None, "code": None}
    assert error_record(7, "c-1", None, "no") == {
        "id": "batch_req_7",
        "custom_id": "c-1",
        "response": {"status_code": 400, "request_id": "req_7", "body": {"error": error}},
        "error": None,
    }


def test_people_see_questions_and_answers():
    demo = Tokenizer(resolve_model("demo", "", may_download=False))
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "and then?"}]
    for prompt, question in ((TextPrompt("one"), "one"), (ChatPrompt(messages), "and then?")):
        for is_batch, url in ((False, ""), (True, CHAT_URL if isinstance(prompt, ChatPrompt) else COMPLETIONS_URL)):
            batch = {"custom_id": "x", "url": url} if is_batch else {}
            line = ParsedLine(prompts=[prompt], sampling=SamplingParams(), **batch)
            record = result_record(3, line, OUTPUT, model="m", fingerprint=FINGERPRINT, tokenizer=demo)
            assert describe_record(record, 3, line) == f"--- {question}\nho\n"
    for custom_id in (None, "x"):
        record = error_record(3, custom_id, None, "it is wrong")
        assert describe_record(record, 3, None) == "--- line 3\nerror: line 3: it is wrong\n"
