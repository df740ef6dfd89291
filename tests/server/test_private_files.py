"""Modes of what a server keeps, under the mask that leaves files open to everybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from serving import Server, serving, wait_for

BOUNDARY = "b"
UPLOAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "red", "max_tokens": 1}}\n'
    f"\r\n--{BOUNDARY}--\r\n"
).encode()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The folder of files, which an earlier version has left open, and that of temporary files."""
    files, temporary = tmp_path_factory.mktemp("kept") / "files", tmp_path_factory.mktemp("temporary")
    (files / "batches").mkdir(parents=True)
    for folder in (files, files / "batches"):
        folder.chmod(0o777)
    return files, temporary


@pytest.fixture(scope="module")
def server(folders):
    files, temporary = folders
    before = os.umask(0)
    try:
        with serving(
            "--files-dir", str(files), "--num-kv-blocks", "512", supervised=True, TMPDIR=str(temporary)
        ) as server:
            yield server
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Files and folders below, and itself, that anybody else may read, write or enter."""
    paths = [folder, *folder.rglob("*")]
    return [f"{path}: {path.lstat().st_mode:o}" for path in paths if path.lstat().st_mode & 0o077]


def test_files_and_batches_are_for_the_user_alone(server: Server, folders):
    content = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    file = server.ask("POST", "/v1/files", UPLOAD, **content).body
    batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    status, made = server.post("/v1/batches", batch)
    assert status == 200, made
    wait_for(lambda: server.get(f"/v1/batches/{made['id']}")[1]["status"] == "completed", 60)
    files, _ = folders
    assert len([*files.rglob("*")]) >= 8  # the upload, the answers, the batch, their records, the secret, the lock
    assert not open_to_others(files)


def test_local_sockets_are_for_the_user_alone(server: Server, folders):
    names = [path for path in folders[1].iterdir() if path.name.startswith("labinfer-run-")]
    assert names
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in names)
