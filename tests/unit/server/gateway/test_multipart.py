"""Forms with files, however they are cut into pieces."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from python_multipart.exceptions import FormParserError

from labinfer.server.gateway.multipart import MultipartReader, PartBegin

TYPE = 'multipart/form-data; charset=utf-8; boundary="b-1"'
CONTENT = b"\r\n--b-2\r\n--b\x00\xff\r\n"
BODY = (
    b'--b-1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b-1\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n'
    b'--b-1\r\nContent-Type: text/plain\r\nContent-Disposition: form-data; name="file"; filename="a \xc3\xa4.jsonl"\r\n\r\n'
    + CONTENT
    + b"\r\n--b-1--\r\nepilogue"
)


def read(pieces) -> tuple[list[tuple[str, str | None, bytes]], bool]:
    reader, parts = MultipartReader(TYPE), []
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, PartBegin):
                parts.append([event.name, event.filename, b""])
            else:
                parts[-1][2] += event
    return [tuple(part) for part in parts], reader.is_whole


def test_parts_are_the_same_however_the_body_is_cut():
    expected = [("purpose", None, b"batch"), ("empty", None, b""), ("file", "a ä.jsonl", CONTENT)]
    assert read([BODY]) == (expected, True)
    assert read(bytes([byte]) for byte in BODY) == (expected, True)
    draw = random.Random(1)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(BODY)), 5))
        pieces = [BODY[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(BODY)], strict=True)]
        assert read(pieces) == (expected, True)


def test_file_name_in_an_encoding_of_its_own_is_no_name():
    """RFC 7578, 4.2: a form must not have one."""
    head = b"Content-Disposition: form-data; name=\"file\"; filename*=utf-7''+2AA-.jsonl"
    assert read([b"--b-1\r\n" + head + b"\r\n\r\n\r\n--b-1--"]) == ([("file", None, b"")], True)


def test_file_name_that_is_no_utf8_is_text_that_json_can_hold():
    head = b'Content-Disposition: form-data; name="file"; filename="\xed\xa0\x80.jsonl"'
    assert read([b"--b-1\r\n" + head + b"\r\n\r\n\r\n--b-1--"]) == ([("file", "\ufffd\ufffd\ufffd.jsonl", b"")], True)


@pytest.mark.parametrize("end", [10, 60, len(BODY) - 20])
def test_form_that_is_cut_off_is_not_whole(end):
    assert not read([BODY[:end]])[1]


@pytest.mark.parametrize(
    "body",
    [
        b"x" * 2000,
        b"--b-1xx",
        b"--b-1\r\nContent-Disposition: form-data\r\n\r\n",
        b"--b-1\r\n" + b"a: b\r\n" * 8192,
        b"--b-1\r\na: " + b"b" * 8192,
        b"--b-1\r\n" + b"a" * 8192,
    ],
    ids=["no boundary", "something behind it", "no name", "long head", "long field", "long name of a field"],
)
def test_broken_forms_are_refused(body):
    with pytest.raises(FormParserError):
        read([body])


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_types_are_refused(content_type):
    with pytest.raises(FormParserError):
        MultipartReader(content_type)


def test_mutated_forms_end_or_are_refused():
    draw = random.Random(2)
    for _ in range(500):
        body = bytearray(BODY)
        for _ in range(draw.randrange(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        try:
            read([bytes(body)])
        except FormParserError:
            pass


@pytest.mark.parametrize("begin", [BODY, BODY[: BODY.index(b"\r\n--b-2")], b"\r\n"], ids=["end", "content", "begin"])
def test_endless_pieces_take_no_memory(begin):
    reader, piece = MultipartReader(TYPE), bytes(1 << 20) if begin != b"\r\n" else b"\r\n" * (1 << 19)
    reader.feed(begin)
    tracemalloc.start()
    for _ in range(10):
        assert all(event == piece for event in reader.feed(piece))
    assert tracemalloc.get_traced_memory()[0] < 1 << 16
    tracemalloc.stop()


def test_form_of_endless_parts_is_refused():
    part = b'--b-1\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    with pytest.raises(FormParserError, match="more than 16 parts"):
        read([part] * 17)
