"""Reading a checkpoint into the system's cache ahead of the loader."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path

import pytest

from labinfer.weights import read_ahead
from labinfer.weights.read_ahead import PacedReadAhead, read_part, start_reading_ahead


def make_files(directory: Path, *sizes: int) -> list[Path]:
    paths = [directory / f"model-{number}.safetensors" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(os.urandom(size))
    return paths


def drop(path: Path) -> None:
    """Out of the cache; a file system that lives in memory keeps it there."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> list[bool]:
    """Which pages of a file are in the system's cache: ``mincore(2)``."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=2) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(view)
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view)), pages) == 0
        )
        del first
        return [bool(page & 1) for page in pages]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_are_all_the_bytes_once(tmp_path, monkeypatch, num_parts):
    monkeypatch.setattr(read_ahead, "PIECE", 1000)
    files = make_files(tmp_path, 5000, 1, 12345)
    assert sum(read_part(files, part, num_parts) for part in range(num_parts)) == 17346
    assert max(read_part(files, part, num_parts) for part in range(num_parts)) <= -(-17346 // num_parts)


def test_what_is_read_is_in_the_systems_cache(tmp_path):
    paths = make_files(tmp_path, 40 * mmap.PAGESIZE, 40 * mmap.PAGESIZE)
    for path in paths:
        drop(path)
    if any(any(cached_pages(path)) for path in paths):
        pytest.skip("this file system keeps its files in memory")
    assert start_reading_ahead(str(tmp_path), "", 1, 2).join() is None
    assert not any(cached_pages(paths[0]))
    assert all(cached_pages(paths[1]))


def test_checkpoint_too_large_for_the_cache_is_left_to_the_loader(tmp_path, monkeypatch):
    files = make_files(tmp_path, 5000)
    monkeypatch.setattr(read_ahead, "MEMORY_FRACTION", 1e-9)
    assert read_part(files, 0, 1) == 0


@pytest.mark.parametrize("drops", [False, True])
def test_paced_reading_stays_within_its_window_and_drops_what_is_loaded(tmp_path, monkeypatch, drops):
    size, count = 8 * mmap.PAGESIZE, 6
    monkeypatch.setattr(read_ahead, "WINDOW", 2 * size)
    read, dropped, moved = [], [], threading.Condition()

    def note(calls, position):
        with moved:
            calls.append(position // size)
            moved.notify()

    monkeypatch.setattr(read_ahead, "read_span", lambda path, position, stop: note(read, position))
    monkeypatch.setattr(read_ahead, "drop_span", lambda path, position, count: note(dropped, position))
    spans = [(tmp_path / "model.safetensors", index * size, size) for index in range(count)]
    # the last slice is another part of the first tensor
    ahead = PacedReadAhead([*((size, [span]) for span in spans), (size, spans[:1])], drops)
    with contextlib.closing(ahead):
        for loaded in range(count + 1):
            ahead.advance(loaded * size)
            soon = list(range(min(count, loaded + 3)))
            with moved:
                assert moved.wait_for(lambda soon=soon: read == soon, timeout=10)
    assert read == [0, 1, 2, 3, 4, 5]
    assert dropped == sorted(dropped) and set(dropped) <= {1, 2, 3, 4, 5} and bool(dropped) == drops


@pytest.mark.parametrize("model", ["no such model", "empty"])
def test_what_is_wrong_with_a_checkpoint_is_not_said_here(tmp_path, model, monkeypatch, capfd):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    start_reading_ahead(model, "", 0, 1).join()
    assert capfd.readouterr() == ("", "")
