"""Files of a batch job: lines in, lines out, and the shape of the records."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from labinfer.batch.reader import JsonlReader
from labinfer.batch.records import error_record, result_record
from labinfer.batch.writer import JsonlWriter
from labinfer.errors import UserError
from labinfer.llm import RequestOutput
from labinfer.plan import SamplingParams
from labinfer.protocol import CHAT_URL, COMPLETIONS_URL, ParsedLine

OUTPUT = RequestOutput(
    key=None,
    prompt_token_ids=[1, 2, 3],
    text="ho",
    token_ids=[4, 5],
    finish_reason="length",
    num_cached_tokens=2,
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
    return ParsedLine({"prompt": "hi"}, SamplingParams(), **fields)


# Records.


@pytest.mark.parametrize(("own_id", "expected"), [(None, 7), ("x", "x"), (0, 0)])
def test_a_simple_result_has_its_own_id_or_its_lines_number(own_id, expected):
    record = result_record(7, parsed(id=own_id), OUTPUT, "m")
    usage = {"id": expected, "text": "ho", "token_ids": [4, 5], "finish_reason": "length", "usage": USAGE}
    assert record == usage


def test_a_completion_result_has_openais_batch_output_shape():
    record = result_record(7, parsed(custom_id="c-1", url=COMPLETIONS_URL, model="asked"), OUTPUT, "m")
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


def test_a_chat_result_carries_a_message():
    record = result_record(7, parsed(custom_id="c-1", url=CHAT_URL), OUTPUT, "m")
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["id"]) == ("chat.completion", "m", "chatcmpl-7")
    message = {"role": "assistant", "content": "ho"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


@pytest.mark.parametrize(("own_id", "expected"), [(None, 7), ("x", "x"), (0, 0)])
def test_a_simple_error_names_its_line(own_id, expected):
    error = {"message": "line 7: no", "type": "invalid_request_error", "line": 7}
    assert error_record(7, None, own_id, "no") == {"id": expected, "error": error}


def test_a_batch_error_answers_400_by_its_custom_id():
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
    return list(JsonlReader(str(tmp_path / "in.jsonl")))


def test_lines_are_numbered_as_an_editor_does(tmp_path):
    assert read(tmp_path, b"a\n\n  \t\r\nb\n") == [(1, b"a"), (4, b"b")]


def test_a_byte_order_mark_and_windows_line_ends_are_passed_over(tmp_path):
    assert read(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n{"b": 2}\r\n') == [(1, b'{"a": 1}'), (2, b'{"b": 2}')]


def test_the_last_line_needs_no_line_end(tmp_path):
    assert read(tmp_path, b"a\nb") == [(1, b"a"), (2, b"b")]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_lines(tmp_path, data):
    assert read(tmp_path, data) == []


def test_line_separators_inside_text_do_not_break_a_line(tmp_path):
    line = '{"prompt": "a\u2028b\x85c\x0c"}'.encode()
    assert read(tmp_path, line + b"\n") == [(1, line)]


def test_a_missing_input_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--input .*nowhere.jsonl: No such file"):
        JsonlReader(str(tmp_path / "nowhere.jsonl"))


def test_a_directory_for_input_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a directory"):
        JsonlReader(str(tmp_path))


def test_standard_input_is_read_for_a_dash(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert list(JsonlReader("-")) == [(1, b"a"), (2, b"b")]


# Writing.


def test_lines_are_whole_json_with_text_as_it_is(tmp_path):
    writer = JsonlWriter(str(tmp_path / "out.jsonl"))
    records = [{"text": "你好\n\u2028"}, {"n": [1, 2.5, None]}]
    for record in records:
        writer.write(record)
        lines = (tmp_path / "out.jsonl").read_bytes().decode()  # before close: nothing is held back
        assert lines.endswith("\n")
    writer.close()
    assert [json.loads(line) for line in lines.split("\n")[:-1]] == records
    assert "你好" in lines


def test_half_a_surrogate_pair_does_not_stop_the_job(tmp_path):
    writer = JsonlWriter(str(tmp_path / "out.jsonl"))
    writer.write({"text": "a\ud800b"})
    writer.close()
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == {"text": "a?b"}


def test_an_older_output_is_kept_until_the_job_begins(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    writer = JsonlWriter(str(path))
    assert path.read_text() == "old\n"
    writer.begin()
    assert path.read_text() == ""
    writer.write({"n": 1})
    writer.close()
    assert path.read_text() == '{"n": 1}\n'


def test_what_is_no_plain_file_is_not_cut():
    writer = JsonlWriter("/dev/null")
    writer.begin()
    writer.write({"n": 1})
    writer.close()


def test_the_input_is_refused_for_output_by_whatever_name(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for name in ("in.jsonl", "link.jsonl", "./in.jsonl"):
        with pytest.raises(UserError, match="is the --input file"):
            JsonlWriter(f"{tmp_path}/{name}", str(tmp_path / "in.jsonl"))
    assert (tmp_path / "in.jsonl").read_text() == "{}\n"


def test_a_missing_directory_for_output_is_named(tmp_path):
    with pytest.raises(UserError, match="--output .*there is no directory .*nowhere"):
        JsonlWriter(str(tmp_path / "nowhere" / "out.jsonl"))


def test_a_directory_for_output_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot write --output"):
        JsonlWriter(str(tmp_path))


def test_a_full_disk_is_a_user_error():
    writer = JsonlWriter("/dev/full")
    with pytest.raises(UserError, match="No space left"):
        writer.write({"text": "x"})
    writer.close()


def test_standard_output_is_written_for_a_dash_after_what_was_printed():
    code = (
        "from labinfer.batch.writer import JsonlWriter\nprint('before')\n"
        "writer = JsonlWriter('-')\nwriter.write({'text': '你好'})\nwriter.close()\nprint('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode() == 'before\n{"text": "你好"}\nafter\n'
