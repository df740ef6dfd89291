"""Sealed files: any damage, another name and another owner are noticed; a file is written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from labinfer.native.cache_file import Damaged, locked, read_sealed, replacing, write_sealed

CONTENT = b'{"seconds": [0.25, 0.5], "name": "labinfer 1"}'


@pytest.fixture
def sealed(tmp_path) -> Path:
    path = tmp_path / "costs-1.json"
    write_sealed(path, CONTENT)
    return path


def test_content_comes_back_and_nothing_else_is_left(sealed):
    assert read_sealed(sealed) == CONTENT
    assert list(sealed.parent.iterdir()) == [sealed] and sealed.stat().st_mode & 0o777 == 0o600


def test_every_bit_and_every_length_counts(sealed):
    data = sealed.read_bytes()
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        sealed.write_bytes(changed)
        with pytest.raises(Damaged):
            read_sealed(sealed)
    for size in range(len(data)):
        sealed.write_bytes(data[:size])
        with pytest.raises(Damaged):
            read_sealed(sealed)
    sealed.write_bytes(data + b"\n")
    with pytest.raises(Damaged):
        read_sealed(sealed)


def test_random_bytes_are_no_sealed_file(sealed):
    for seed in range(100):
        sealed.write_bytes(b"x\nlabinfer " + random.Random(seed).randbytes(seed))
        with pytest.raises(Damaged):
            read_sealed(sealed)


def test_file_under_another_name_says_whose_it_is(sealed):
    other = sealed.with_name("costs-2.json")
    sealed.rename(other)
    with pytest.raises(Damaged, match=r"it was written as costs-1\.json"):
        read_sealed(other)


@pytest.mark.parametrize("kind", ["FIFO", "symbolic link", "directory", "device"])
def test_what_is_no_regular_file_is_refused_at_once(sealed, tmp_path, kind):
    moved = sealed.rename(tmp_path / "moved")
    if kind == "FIFO":
        os.mkfifo(sealed)
    elif kind == "symbolic link":
        sealed.symlink_to(moved)
    elif kind == "directory":
        sealed.mkdir()
    else:
        try:
            os.mknod(sealed, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, which has no end
        except PermissionError:
            pytest.skip("only root makes devices")
    with pytest.raises(Damaged):
        read_sealed(sealed)


def test_file_that_others_may_have_written_is_refused(sealed, monkeypatch):
    sealed.chmod(0o620)
    with pytest.raises(Damaged, match="others may write"):
        read_sealed(sealed)
    sealed.chmod(0o600)
    if os.geteuid():
        pytest.skip("only root gives files to others")
    os.chown(sealed, 12345, 12345)
    with pytest.raises(Damaged, match="belongs to user 12345"):
        read_sealed(sealed)


def test_file_that_is_too_large_is_not_read(sealed):
    os.truncate(sealed, 1 << 40)
    with pytest.raises(Damaged, match="1099511627776 bytes"):
        read_sealed(sealed)


def test_full_disk_leaves_the_old_file_and_no_other(sealed, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_sealed(sealed, b"new")
    assert read_sealed(sealed) == CONTENT and list(sealed.parent.iterdir()) == [sealed]


def test_file_is_on_the_disk_before_its_name_and_its_name_before_the_end(sealed, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.path.realpath(f"/proc/self/fd/{descriptor}")))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append("replace"), replace(source, target)))
    with replacing(sealed) as file:
        file.write(b"new")
    assert done[1:] == ["replace", str(sealed.parent.resolve())] and done[0].endswith(".unfinished")


def test_one_at_a_time_has_a_lock(tmp_path):
    path, inside, most, told = tmp_path / "x.lock", [], [], []

    def work() -> None:
        with locked(path, 60, lambda: told.append(1)):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8 and len(told) <= 7 and not path.exists()


@pytest.mark.parametrize("kind", ["directory", "symbolic link", "missing folder"])
def test_where_no_lock_can_be_the_block_runs(tmp_path, kind):
    path = tmp_path / "x.lock"
    if kind == "directory":
        path.mkdir()
    elif kind == "symbolic link":
        path.symlink_to(tmp_path / "target")
    else:
        path = tmp_path / "missing" / "x.lock"
    with locked(path, 60, lambda: None):
        pass
    assert not (tmp_path / "target").exists()
