"""Files of a batch job: lines in, lines out, and the shape of the records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from labinfer.api.batch.reader import JsonlReader, LongLine
from labinfer.base.errors import UserError
from labinfer.observe.output_file import OutputFile

MIB = 1 << 20
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
    monkeypatch.setattr("labinfer.api.batch.reader.MAX_BYTES_AHEAD", 3 * MIB)
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
    code = "from labinfer.api.batch.reader import JsonlReader\nprint([line for line in JsonlReader('-', 100) if line])"
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
    with pytest.raises(UserError, match="--output .*directory .*nowhere does not exist"):
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
    assert b"everything written before is complete" in done.stderr
    assert (tmp_path / "out").read_text() == '{"n": 1}\n'


def test_standard_output_is_written_for_a_dash_after_what_was_printed():
    code = (
        "from labinfer.observe.output_file import OutputFile\nprint('before')\n"
        "writer = OutputFile('-')\nwriter.write_json({'text': '你好'})\nprint('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode() == 'before\n{"text": "你好"}\nafter\n'
