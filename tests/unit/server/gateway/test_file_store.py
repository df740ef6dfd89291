"""The folder of ``--files-dir``: for one server at a time, and tried before anything is loaded."""

from __future__ import annotations

import os
import threading
import time

import pytest

from labinfer.base.errors import UserError
from labinfer.server.gateway import process
from labinfer.server.gateway.file_store import FileStore, lock_folder
from labinfer.server.gateway.options import ServerOptions


def test_folder_of_another_server_is_refused_and_nothing_stays_open(tmp_path, monkeypatch):
    options = ServerOptions(port=0, files_dir=str(tmp_path / "made" / "here"))
    process.listen(options).close()
    monkeypatch.setattr(process, "END_SECONDS", 0.0)
    held = lock_folder(tmp_path / "made" / "here")
    opened = len(os.listdir("/proc/self/fd"))
    for begin in (process.listen, lambda given: FileStore(given, time.time)):
        with pytest.raises(UserError, match="another server uses it"):
            begin(options)
    assert len(os.listdir("/proc/self/fd")) <= opened
    os.close(held)
    os.close(FileStore(options, time.time)._lock)


def test_server_that_is_at_its_last_words_is_waited_for(tmp_path):
    held = lock_folder(tmp_path)
    threading.Timer(0.3, os.close, [held]).start()
    os.close(lock_folder(tmp_path, 30))


def test_place_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file cannot be used: Not a directory"):
        process.listen(ServerOptions(port=0, files_dir=str(tmp_path / "file")))


def test_shared_folder_stays_open_to_others(tmp_path):
    tmp_path.chmod(0o1777)
    os.close(lock_folder(tmp_path))
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_part_that_another_user_has_made_in_a_shared_folder_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    (planted := tmp_path / "files").mkdir(mode=0o777)
    os.chown(planted, 12345, -1)
    with pytest.raises(UserError, match="files belongs to user 12345"):
        lock_folder(tmp_path)
    planted.rmdir()
    (tmp_path / "elsewhere").mkdir()
    planted.symlink_to("elsewhere")
    os.chown(planted, 12345, -1, follow_symlinks=False)
    with pytest.raises(UserError, match="files belongs to user 12345"):
        lock_folder(tmp_path)
    os.chown(planted, 0, -1, follow_symlinks=False)
    os.close(lock_folder(tmp_path))
