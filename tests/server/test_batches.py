"""``/v1/files`` and ``/v1/batches`` through OpenAI's own client, and over the death of a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import Server, serving

CHAT_URL = "/v1/chat/completions"
KEYS = ("key-of-the-first", "key-of-the-second")
BODIES: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": [{"role": "user", "content": "17 + 25 = ?"}], "temperature": 0},
    "/v1/completions": {"prompt": "red blue", "max_tokens": 2},
    "/v1/embeddings": {"input": "red"},
    "/v1/responses": {"input": "17 + 25 = ?", "temperature": 0},
}
SECONDS = 60.0


def serve(folder: Path, *keys: str):
    key_flags = [argument for key in keys for argument in ("--api-key", key)]
    flags = ("--max-file-size", "1", "--max-files-size", "4", "--max-batch-requests", "4")
    return serving("--dtype", "float32", "--num-kv-blocks", "512", "--files-dir", str(folder), *flags, *key_flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def server(folder):
    with serve(folder, *KEYS) as server:
        yield server
        assert "Traceback" not in server.text


def make_client(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=60, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(server):
    return make_client(server, KEYS[0])


def line(custom_id: str, url: str = CHAT_URL, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": BODIES[url] | fields}


def upload(client: openai.OpenAI, *lines: dict[str, Any] | str, name: str = "in.jsonl"):
    text = "".join((given if isinstance(given, str) else json.dumps(given)) + "\n" for given in lines)
    return client.files.create(file=(name, text.encode()), purpose="batch")


def start(client: openai.OpenAI, *lines: dict[str, Any] | str, url: str = CHAT_URL, **fields: Any):
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **fields)


def wait(client: openai.OpenAI, id: str, until: Callable[[Any], bool] = lambda batch: False):
    """The batch when it is over, or as it has to be."""
    deadline = time.monotonic() + SECONDS
    while True:
        batch = client.batches.retrieve(id)
        if until(batch) or batch.status in ("completed", "failed", "cancelled"):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def records(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Lines of an output by their ``custom_id``."""
    if file_id is None:
        return {}
    lines = client.files.content(file_id).text.splitlines()
    found = {record["custom_id"]: record for record in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


class TestFiles:
    def test_file_is_kept_listed_and_deleted(self, client):
        content = b'{"a": 1}\r\n--not the boundary\r\n\x00\xff'
        file = client.files.create(file=("../weird name.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(content), "weird name.jsonl", "batch")
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).content == content
        for wanted, part in {
            "bytes=2-5": content[2:6],
            "bytes=-3": content[-3:],
            **dict.fromkeys(("bytes=5-3", "bytes=x", "bytes=0-0,2-2", "lines=1-2"), content),
        }.items():
            given = client.files.content(file.id, extra_headers={"Range": wanted})
            assert (given.content, given.response.status_code) == (part, 200 if part == content else 206), wanted
        other = upload(client)
        ids = [entry.id for entry in client.files.list(limit=1)]
        assert {file.id, other.id} <= set(ids) and len(ids) == len(set(ids))
        for given in (file, other):
            assert client.files.delete(given.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)

    def test_too_long_a_file_is_refused_and_leaves_nothing(self, client, folder):
        before = sorted(folder.rglob("*"))
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("long", b"x" * (1 << 20) + b"y"), purpose="batch")
        assert caught.value.status_code == 413
        assert sorted(folder.rglob("*")) == before

    def test_room_is_bounded_for_a_caller(self, client):
        kept = []
        with pytest.raises(openai.BadRequestError, match="max-files-size"):
            for _ in range(3):
                kept.append(client.files.create(file=("half", b"x" * (1 << 20)), purpose="batch"))
        for file in kept:
            client.files.delete(file.id)

    @pytest.mark.parametrize(
        ("body", "content_type", "status"),
        [
            (b"{}", "application/json", 415),
            (b"--x--\r\n", "multipart/form-data; boundary=x", 400),
            (b"nothing", "multipart/form-data; boundary=x", 400),
            (
                b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\na\r\n--x--\r\n',
                "multipart/form-data; boundary=x",
                400,
            ),
        ],
        ids=["json", "empty", "broken", "without a purpose"],
    )
    def test_broken_forms_are_refused(self, server, body, content_type, status):
        reply = server.ask("POST", "/v1/files", body, KEYS[0], **{"Content-Type": content_type})
        assert reply.status == status, reply.body


class TestBatches:
    @pytest.mark.parametrize("url", BODIES)
    def test_lines_are_answered_as_requests(self, client, server, url):
        batch = start(client, line("good", url), line("bad", url, model="another"), url=url, metadata={"a": "b"})
        assert (batch.object, batch.endpoint, batch.metadata) == ("batch", url, {"a": "b"})
        batch = wait(client, batch.id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 2, 1, 1)
        (good,) = records(client, batch.output_file_id).values()
        assert good["response"]["status_code"] == 200
        _, body = server.post(url, BODIES[url], KEYS[0])
        for name in ("id", "created", "created_at", "completed_at", "usage", "output"):
            assert body.pop(name, None) is None or good["response"]["body"].pop(name)
        if "choices" not in body or url == CHAT_URL:
            assert good["response"]["body"] == body
        (bad,) = records(client, batch.error_file_id).values()
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 404)
        assert bad["response"]["body"]["error"]["code"] == "model_not_found"
        assert batch.id in [entry.id for entry in client.batches.list(limit=1)]

    def test_file_that_is_no_batch_fails_by_its_lines(self, client):
        lines = ["{", line("a"), line("a"), line("b", "/v1/completions"), line("c") | {"method": "GET"}]
        batch = wait(client, start(client, *lines, line("d", stream=True)).id)
        assert batch.status == "failed"
        assert [(error.line, error.code) for error in batch.errors.data] == [
            (1, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "mismatched_url"),
            (5, "invalid_method"),
            (6, "invalid_request"),
        ]
        assert wait(client, start(client).id).errors.data[0].code == "empty_file"

    def test_cancelled_batch_keeps_what_it_has(self, client):
        lines = [line(str(number), max_tokens=60, ignore_eos=True) for number in range(100)]
        batch = start(client, *lines)
        wait(client, batch.id, lambda batch: batch.request_counts.completed > 0)
        with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = wait(client, batch.id)
        assert batch.status == "cancelled"
        assert 0 < len(records(client, batch.output_file_id)) == batch.request_counts.completed < 100
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(batch.id)
        client.files.delete(batch.input_file_id)

    def test_error_names_the_field_of_the_file(self, client):
        output = client.files.retrieve(wait(client, start(client, line("a")).id).output_file_id)
        for id, error, code in (
            ("file-1", openai.NotFoundError, "file_not_found"),
            (output.id, openai.BadRequestError, None),
        ):
            with pytest.raises(error) as caught:
                client.batches.create(input_file_id=id, endpoint=CHAT_URL, completion_window="24h")
            assert (caught.value.param, caught.value.code) == ("input_file_id", code)

    def test_another_key_sees_nothing(self, server, client):
        batch, other = start(client, line("a")), make_client(server, KEYS[1])
        assert not list(other.files.list()) and not list(other.batches.list())
        for refused in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.input_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT_URL, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        assert wait(client, batch.id).status == "completed"


def test_batch_goes_on_when_the_server_was_killed(tmp_path):
    with serve(tmp_path, KEYS[0]) as server:
        client = make_client(server, KEYS[0])
        lines = [line(str(number), max_tokens=30, ignore_eos=True, seed=number) for number in range(30)]
        batch = start(client, *lines)
        begun = wait(client, batch.id, lambda batch: batch.request_counts.completed > 4)
        assert begun.status == "in_progress"
    with serve(tmp_path, KEYS[1], KEYS[0]) as server:  # under another name than before
        assert server.get(f"/v1/batches/{batch.id}", KEYS[1])[0] == 404
        client = make_client(server, KEYS[0])
        batch = wait(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert len(records(client, batch.output_file_id)) == 30
        assert not list((tmp_path / "batches").glob("*.answers*"))
        assert "Traceback" not in server.text


def test_server_without_a_folder_says_so(tmp_path):
    with serving("--num-kv-blocks", "512") as server:
        for method, path in (
            ("GET", "/v1/files"),
            ("GET", "/v1/batches"),
            ("DELETE", "/v1/files/x"),
            ("POST", "/v1/files"),
        ):
            reply = server.ask(method, path)
            assert (reply.status, reply.error["code"]) == (404, "files_not_offered")
