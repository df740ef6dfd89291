"""Files of a batch job: lines in, lines out, and the shape of the records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest

from labinfer.batch.reader import JsonlReader, LongLine
from labinfer.batch.records import describe_record, error_record, result_record
from labinfer.errors import UserError
from labinfer.jsonl import ParsedLine
from labinfer.observe.output_file import OutputFile
from labinfer.outputs import Completion, RequestOutput
from labinfer.plan import TokenLogprobs
from labinfer.prompts import ChatPrompt, TextPrompt
from labinfer.protocol import CHAT_URL, COMPLETIONS_URL
from labinfer.sampling_params import SamplingParams
from labinfer.text.spelling import spell
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


def parsed(**fields) -> ParsedLine:
    prompt = ChatPrompt([]) if fields.get("url") == CHAT_URL else TextPrompt("hi")
    return ParsedLine(**({"prompt": prompt, "sampling": SamplingParams()} | fields))


# Records.


@pytest.mark.parametrize(("own_id", "expected"), [(None, 7), ("x", "x"), (0, 0)])
def test_simple_result_has_its_own_id_or_its_lines_number(own_id, expected):
    record = result_record(7, parsed(id=own_id), OUTPUT, "m", None)
    usage = {"id": expected, "text": "ho", "token_ids": [4, 5], "finish_reason": "length", "usage": USAGE}
    assert record == usage


def test_completion_result_has_openais_batch_output_shape():
    record = result_record(7, parsed(custom_id="c-1", url=COMPLETIONS_URL, model="asked"), OUTPUT, "m", None)
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
        "model": "asked",
        "choices": [{"index": 0, "text": "ho", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
    }


def test_chat_result_carries_a_message():
    record = result_record(7, parsed(custom_id="c-1", url=CHAT_URL), OUTPUT, "m", None)
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["id"]) == ("chat.completion", "m", "chatcmpl-7")
    message = {"role": "assistant", "content": "ho"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def chat_choice(text: str, finish_reason: str = "stop", **prompt) -> dict:
    line = replace(parsed(custom_id="c-1", url=CHAT_URL), prompt=ChatPrompt([], ToolUse.from_fields(prompt)))
    output = replace(
        OUTPUT,
        completions=[
            Completion(index=0, text=text, token_ids=[4], finish_reason=finish_reason, stop_reason=None, logprobs=None)
        ],
    )
    tokenizer = Tokenizer(resolve_model("demo", "", may_download=False))
    return result_record(7, line, output, "m", tokenizer)["response"]["body"]["choices"][0]


@pytest.mark.parametrize(("text", "content"), [(PARIS, None), ("Let me look.\n" + PARIS, "Let me look.")])
def test_chat_result_carries_calls_of_the_tools_that_were_offered(text, content):
    choice = chat_choice(text, tools=TOOLS)
    call_id = choice["message"]["tool_calls"][0]["id"]
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": call_id, "type": "function", "function": function}]
    assert choice["message"] == {"role": "assistant", "content": content, "tool_calls": calls}
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(json.dumps(choice))


def test_call_that_was_cut_off_is_text():
    choice = chat_choice(PARIS[:50], "length", tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": PARIS[:50]}


def test_thoughts_stand_beside_the_content():
    choice = chat_choice("<think>\nAdd them.\n</think>\n\n42", tools=TOOLS)
    thoughts = {"reasoning": "Add them.", "reasoning_content": "Add them."}
    assert choice["message"] == {"role": "assistant", "content": "42"} | thoughts
    line = parsed(prompt=ChatPrompt([]))
    completion = replace(OUTPUT.completions[0], text="<think>Add them.</think>42")
    tokenizer = Tokenizer(resolve_model("demo", "", may_download=False))
    record = result_record(7, line, replace(OUTPUT, completions=[completion]), "m", tokenizer)
    assert (record["text"], record["reasoning"]) == ("42", "Add them.")
    raw = result_record(7, parsed(), replace(OUTPUT, completions=[completion]), "m", tokenizer)
    assert raw["text"] == "<think>Add them.</think>42" and "reasoning" not in raw


def test_parallel_calls_may_be_unwanted():
    both = PARIS + PARIS
    assert len(chat_choice(both, tools=TOOLS)["message"]["tool_calls"]) == 2
    assert len(chat_choice(both, tools=TOOLS, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(("text", "prompt"), [(PARIS, {}), ("No call.\n", {"tools": TOOLS})])
def test_answer_without_calls_is_its_text(text, prompt):
    choice = chat_choice(text, **prompt)
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"


class Letters:
    """A tokenizer whose token 1 is "a", 2 is "b", …"""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token_id - 1) for token_id in token_ids)

    def spell(self, token_id):
        text = self.decode([token_id])
        return spell(token_id, text, text)

    def reply_parser(self, prompt_token_ids, tools, parallel):
        return None


def measured(token_id: int, **top: float) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, {int(key[1:]): value for key, value in top.items()})


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
    prompt_logprobs=[measured(2, t1=-0.25), measured(3)],
    num_output_tokens=3,
)


def test_simple_result_has_every_answer_and_its_log_probabilities():
    record = result_record(7, parsed(echo=True), SEVERAL, "m", Letters())
    first = {"token_id": 4, "logprob": -0.5, "top": {4: -0.5, 6: -1.5}}
    assert (record["text"], record["stop_reason"], record["logprobs"][0]) == ("hide", 5, first)
    assert [(one["index"], one["text"], one["token_ids"]) for one in record["choices"]] == [
        (0, "hide", [4, 5]),
        (1, "hif", [6]),
    ]
    assert [one["token_id"] for one in record["prompt_logprobs"]] == [2, 3]
    assert record["usage"]["completion_tokens"] == 3
    assert json.loads(json.dumps(record))


def test_chat_log_probabilities_have_openais_shape():
    choices = result_record(7, parsed(custom_id="c", url=CHAT_URL), SEVERAL, "m", Letters())["response"]["body"][
        "choices"
    ]
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
    choice = result_record(7, line, SEVERAL, "m", Letters())["response"]["body"]["choices"][0]
    assert choice["text"] == "hide"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d", "e"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"a": -0.25, "b": -0.5}, {"c": -0.5}, {"d": -0.5, "f": -1.5}, {"e": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }


def test_prompt_alone_has_no_answer():
    line = parsed(custom_id="c", url=COMPLETIONS_URL, echo=True, prompt_alone=True)
    body = result_record(7, line, SEVERAL, "m", Letters())["response"]["body"]
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


# Reading.


def read(tmp_path, data: bytes) -> list:
    (tmp_path / "in.jsonl").write_bytes(data)
    return list(JsonlReader(str(tmp_path / "in.jsonl"), MIB))


def test_lines_are_numbered_as_an_editor_does(tmp_path):
    assert read(tmp_path, b"a\n\n  \t\r\nb\n") == [(1, b"a"), (4, b"b")]


def test_byte_order_mark_and_windows_line_ends_are_passed_over(tmp_path):
    assert read(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n{"b": 2}\r\n') == [(1, b'{"a": 1}'), (2, b'{"b": 2}')]


def test_last_line_needs_no_line_end(tmp_path):
    assert read(tmp_path, b"a\nb") == [(1, b"a"), (2, b"b")]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_empty_file_has_no_lines(tmp_path, data):
    assert read(tmp_path, data) == []


def test_line_separators_inside_text_do_not_break_a_line(tmp_path):
    line = '{"prompt": "a\u2028b\x85c\x0c"}'.encode()
    assert read(tmp_path, line + b"\n") == [(1, line)]


@pytest.mark.parametrize(
    "data", [b"a\n%b\nb\n" % (b"x" * MIB), b"a\n%b\r\nb" % (b"x" * (MIB - 1)), b"a\n%b\nb" % (b"x" * 7 * MIB)]
)
def test_line_that_is_too_long_is_passed_over_and_the_next_one_is_read(tmp_path, data):
    first, long, last = read(tmp_path, data)
    assert (first, last) == ((1, b"a"), (3, b"b"))
    assert long == (2, LongLine(len(data.split(b"\n")[1]) + 1))


def test_line_as_long_as_may_be_is_kept(tmp_path):
    line = b"x" * (MIB - 1)
    assert read(tmp_path, b"a\n" + line + b"\n") == [(1, b"a"), (2, line)]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_line_without_end_takes_no_memory(tmp_path, end):
    (tmp_path / "in.jsonl").write_bytes(b"x" * (48 * MIB) + end)
    tracemalloc.start()
    lines = list(JsonlReader(str(tmp_path / "in.jsonl"), MIB))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines == [(1, LongLine(48 * MIB + len(end)))]
    assert peak < 4 * MIB


def test_pipe_is_not_read_far_ahead(monkeypatch):
    monkeypatch.setattr("labinfer.batch.reader.MAX_BYTES_AHEAD", 3 * MIB)
    read_end, write_end = os.pipe()
    line, count = b"x" * (MIB - 1) + b"\n", 9
    writer = threading.Thread(target=lambda: [os.write(write_end, line) for _ in range(count)] + [os.close(write_end)])
    reader = JsonlReader(f"/dev/fd/{read_end}", MIB)
    writer.start()
    while reader._arrived.qsize() < 3:
        time.sleep(0.01)
    time.sleep(0.1)
    assert reader._arrived.qsize() == 3
    assert [number for number, _ in filter(None, reader)] == list(range(1, count + 1))
    writer.join()
    os.close(read_end)


def test_missing_input_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--input .*nowhere.jsonl: No such file"):
        JsonlReader(str(tmp_path / "nowhere.jsonl"), MIB)


def test_directory_for_input_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a directory"):
        JsonlReader(str(tmp_path), MIB)


def test_standard_input_is_read_for_a_dash():
    code = "from labinfer.batch.reader import JsonlReader\nprint([line for line in JsonlReader('-', 100) if line])"
    done = subprocess.run([sys.executable, "-c", code], input=b"a\n\nb", capture_output=True, check=True)
    assert done.stdout == b"[(1, b'a'), (3, b'b')]\n"


def test_slow_pipe_yields_none_until_its_next_line(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # does not wait for a reader
    lines = iter(JsonlReader(str(path), MIB))
    assert next(lines) is None
    os.write(writer, b"a\nhalf")
    assert next(line for line in lines if line) == (1, b"a")
    assert next(lines) is None
    os.close(writer)
    assert [line for line in lines if line] == [(2, b"half")]


def test_input_that_breaks_off_is_a_user_error():
    reader = JsonlReader("/proc/self/mem", MIB)  # opens, but its first byte cannot be read
    with pytest.raises(UserError, match="cannot read --input /proc/self/mem: Input/output error"):
        list(reader)


# Writing.


def test_lines_are_whole_json_with_text_as_it_is(tmp_path):
    writer = OutputFile(str(tmp_path / "out.jsonl"))
    records = [{"text": "你好\n\u2028"}, {"n": [1, 2.5, None]}]
    for record in records:
        writer.write_json(record)
        lines = (tmp_path / "out.jsonl").read_bytes().decode()  # nothing is held back
        assert lines.endswith("\n")
    assert [json.loads(line) for line in lines.split("\n")[:-1]] == records
    assert "你好" in lines


def test_half_a_surrogate_pair_does_not_stop_the_job(tmp_path):
    writer = OutputFile(str(tmp_path / "out.jsonl"))
    writer.write_json({"text": "a\ud800b"})
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == {"text": "a?b"}


def test_older_output_is_kept_until_the_job_begins(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    writer = OutputFile(str(path))
    assert path.read_text() == "old\n"
    writer.begin()
    assert path.read_text() == ""
    writer.write_json({"n": 1})
    assert path.read_text() == '{"n": 1}\n'


def test_what_is_no_plain_file_is_not_cut():
    writer = OutputFile("/dev/null")
    writer.begin()
    writer.write_json({"n": 1})


def test_input_is_refused_for_output_by_whatever_name(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for name in ("in.jsonl", "link.jsonl", "./in.jsonl"):
        with pytest.raises(UserError, match="is the --input file"):
            OutputFile(f"{tmp_path}/{name}", "--output", {"--input": str(tmp_path / "in.jsonl")})
    assert (tmp_path / "in.jsonl").read_text() == "{}\n"


def test_missing_directory_for_output_is_named(tmp_path):
    with pytest.raises(UserError, match="--output .*there is no directory .*nowhere"):
        OutputFile(str(tmp_path / "nowhere" / "out.jsonl"))
    with pytest.raises(UserError, match="File name too long"):
        OutputFile(f"{tmp_path}/{300 * 'x'}/out.jsonl")


def test_directory_for_output_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot write --output"):
        OutputFile(str(tmp_path))


def test_full_disk_is_a_user_error():
    writer = OutputFile("/dev/full")
    with pytest.raises(UserError, match="No space left"):
        writer.write_json({"text": "x"})


def test_line_that_does_not_fit_leaves_nothing_behind(tmp_path):
    code = (
        "import resource, signal, sys\nfrom labinfer.observe.output_file import OutputFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "out = OutputFile(sys.argv[1])\nout.write_json({'n': 1})\nout.write_json({'text': 'x' * 200})"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True)
    assert b"what was written before is complete" in done.stderr
    assert (tmp_path / "out").read_text() == '{"n": 1}\n'


def test_standard_output_is_written_for_a_dash_after_what_was_printed():
    code = (
        "from labinfer.observe.output_file import OutputFile\nprint('before')\n"
        "writer = OutputFile('-')\nwriter.write_json({'text': '你好'})\nprint('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode() == 'before\n{"text": "你好"}\nafter\n'


def test_people_see_questions_and_answers():
    demo = Tokenizer(resolve_model("demo", "", may_download=False))
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "and then?"}]
    for prompt, question in ((TextPrompt("one"), "one"), (ChatPrompt(messages), "and then?")):
        for is_batch, url in ((False, ""), (True, CHAT_URL if isinstance(prompt, ChatPrompt) else COMPLETIONS_URL)):
            batch = {"custom_id": "x", "url": url} if is_batch else {}
            line = ParsedLine(prompt=prompt, sampling=SamplingParams(), **batch)
            record = result_record(3, line, OUTPUT, "m", demo)
            assert describe_record(record, 3, line) == f"--- {question}\nho\n"
    for custom_id in (None, "x"):
        record = error_record(3, custom_id, None, "it is wrong")
        assert describe_record(record, 3, None) == "--- line 3\nerror: line 3: it is wrong\n"
