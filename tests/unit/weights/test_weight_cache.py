"""The folder of packed weights: what is kept, what makes room, and what several processes do there at once."""

from __future__ import annotations

import collections
import dataclasses
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from labinfer.base.plugins import PLUGINS, PluginSource
from labinfer.weights import weight_cache
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.packed_file import PackedFiles, map_states
from labinfer.weights.weight_cache import (
    GIB,
    PIECE,
    Damaged,
    NoRoom,
    WeightCache,
    checkpoint_digest,
    network_file_system,
    read_header,
    try_header,
)

FUNCTIONS = LoadFunctions()
STATES = {
    "a": {"weight": torch.arange(3000, dtype=torch.float32).view(3, 1000), "note": "x", "none": None, "unit": 0.5},
    "b": {"data": torch.arange(5 << 20, dtype=torch.int32).to(torch.uint8), "empty": torch.empty(0), "count": 7},
    "c": {"half": torch.randn(1001).bfloat16()},
}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"x" * 100)
    return directory


@pytest.fixture
def cache(tmp_path) -> WeightCache:
    return WeightCache(tmp_path / "cache", GIB, free_bytes=0)


def files_of(cache: WeightCache, checkpoint: Path, label: str = "all", code: str = "1") -> PackedFiles:
    digest = checkpoint_digest(checkpoint)
    return PackedFiles(
        cache=cache,
        directory=checkpoint,
        checkpoint=digest,
        settings="",
        label=label,
        options="o",
        code=code,
        num_threads=2,
    )


def keep(files: PackedFiles, states=STATES, slices="slices") -> Path:
    files.keep(slices, states, FUNCTIONS, least_bytes=0).join()
    return files.path(slices)


def same(got: dict, wanted: dict) -> bool:
    return got.keys() == wanted.keys() and all(
        torch.equal(got[key], value) and got[key].dtype == value.dtype
        if isinstance(value, torch.Tensor)
        else got[key] == value
        for key, value in wanted.items()
    )


def test_what_is_kept_comes_back(cache, checkpoint):
    files = files_of(cache, checkpoint)
    keep(files)
    states = files.open("slices", FUNCTIONS)
    assert states.keys() == STATES.keys() and all(same(states[name], STATES[name]) for name in STATES)
    assert files.open("other slices", FUNCTIONS) is None
    assert cache.mapped_bytes() in (0, 2 * PIECE)  # copied where the system's pages are small


def test_little_is_not_kept(cache, checkpoint):
    files = files_of(cache, checkpoint)
    assert files.keep("", STATES, FUNCTIONS) is None


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json"])
def test_changed_checkpoint_of_the_same_size_and_date_is_another_one(cache, checkpoint, changed):
    before, path = checkpoint_digest(checkpoint), checkpoint / changed
    status = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns and checkpoint_digest(checkpoint) != before
    copy = checkpoint.with_name("copy")
    shutil.copytree(checkpoint, copy)
    assert checkpoint_digest(copy) != checkpoint_digest(checkpoint)


def test_checkpoint_that_changes_while_it_is_loaded_is_not_kept(cache, checkpoint, caplog):
    caplog.set_level("INFO")
    files = files_of(cache, checkpoint)
    (checkpoint / "model.safetensors").write_bytes(b"y" * 100)
    keep(files)
    assert not cache.files() and not list(cache.folder.iterdir()) and "has changed" in caplog.text


def test_any_byte_counts(cache, checkpoint, tmp_path):
    path = keep(files_of(cache, checkpoint))
    data = path.read_bytes()
    for place in [0, 12_001, PIECE + 7, len(data) - 1, len(data) - 40, len(data) - 200]:
        changed = bytearray(data)
        changed[place] ^= 0x10
        (tmp_path / "changed").write_bytes(changed)
        with open(tmp_path / "changed", "rb") as file, pytest.raises(Damaged):
            map_states(file, *read_header(file), FUNCTIONS.checksum, 1)


def test_least_recently_used_goes_first(cache, checkpoint):
    paths = [keep(files_of(cache, checkpoint, label), slices=label) for label in "abc"]
    for age, path in zip((30, 10, 20), paths, strict=True):
        os.utime(path, (time.time() - age,) * 2)
    files_of(cache, checkpoint).open("a", FUNCTIONS)  # which is used now
    small = WeightCache(cache.folder, 3 * paths[0].stat().st_size, free_bytes=0)
    keep(files_of(small, checkpoint, "d"), slices="d")
    assert [path.exists() for path in paths] == [True, True, False]


def test_what_other_code_made_of_the_same_slice_goes(cache, checkpoint):
    old, other = (keep(files_of(cache, checkpoint, label), slices=label) for label in ("all", "stage 1"))
    new = keep(files_of(cache, checkpoint, "all", code="2"), slices="all")
    assert [path.exists() for path in (old, other, new)] == [False, True, True]


def test_too_much_is_refused(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    cache = WeightCache(tmp_path / "cache", PIECE)
    keep(files_of(cache, checkpoint))
    assert not cache.files() and "--weight-cache-size 0.00390625" in caplog.text


@pytest.mark.parametrize(
    ("total", "left"), [(50 * GIB, 5 * GIB), (1000 * GIB, 10 * GIB)], ids=["small disk", "large disk"]
)
def test_disk_is_not_filled(checkpoint, tmp_path, monkeypatch, caplog, total, left):
    caplog.set_level("INFO")
    cache = WeightCache(tmp_path / "cache", GIB)
    usage = collections.namedtuple("usage", "total used free")
    free = left
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(total, 0, free))
    keep(files_of(cache, checkpoint))
    assert not cache.files() and f"{left // GIB}.0 GiB must stay free" in caplog.text
    free = left + GIB
    keep(files_of(cache, checkpoint))
    assert cache.files()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_folder_that_cannot_be_written_leaves_nothing(cache, checkpoint, monkeypatch, caplog, error):
    caplog.set_level("INFO")

    def fail(file) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    keep(files_of(cache, checkpoint))
    assert not list(cache.folder.iterdir()) and error.strerror in caplog.text


def test_folder_that_is_no_folder_is_told(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "file").write_text("")
    keep(files_of(WeightCache(tmp_path / "file" / "cache", GIB), checkpoint))
    assert "could not be cached" in caplog.text


def test_several_at_once_write_one_file(cache, checkpoint):
    files = files_of(cache, checkpoint)
    path = files.path("slices")
    threads = [files.keep("slices", STATES, FUNCTIONS, least_bytes=0) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert [file.path for file in cache.files()] == [path] and len(list(cache.folder.iterdir())) == 1
    assert files.open("slices", FUNCTIONS) is not None


def test_what_a_killed_process_was_writing_is_written_again(cache, checkpoint):
    cache.folder.mkdir()
    files = files_of(cache, checkpoint)
    path = files.path("slices")
    path.with_suffix(".unfinished").write_bytes(b"x" * PIECE)
    (cache.folder / "other.unfinished").write_bytes(b"x")
    keep(files)
    assert list(cache.folder.iterdir()) == [path] and files.open("slices", FUNCTIONS) is not None


def test_what_another_process_writes_is_left_alone(cache, checkpoint):
    begun, done = threading.Event(), threading.Event()
    cache.folder.mkdir()
    files = files_of(cache, checkpoint)
    path = files.path("slices")

    def write() -> None:
        with cache.writing(path) as file:
            file.write(b"x")
            begun.set()
            done.wait()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    keep(files)  # gives up, and removes nothing
    assert cache.clean() == 0 and path.with_suffix(".unfinished").read_bytes() == b"x"
    done.set()
    thread.join()
    assert path.read_bytes() == b"x"
    assert cache.clean() == 1 and not cache.files()


def test_file_that_was_just_created_is_not_taken_for_that_of_a_killed_process(cache, checkpoint, monkeypatch):
    """Another rank makes room while this one has created its file, and not locked it yet."""
    path, cleaning = files_of(cache, checkpoint).path("slices"), []
    cache.folder.mkdir()
    lock = weight_cache.try_lock

    def lock_late(file) -> bool:
        if not cleaning:
            cleaning.append(threading.Thread(target=cache.clean))
            cleaning[0].start()
            cleaning[0].join(0.2)
        return lock(file)

    monkeypatch.setattr(weight_cache, "try_lock", lock_late)
    with cache.writing(path) as file:
        assert file is not None
        cleaning[0].join()
        file.write(b"x")
    assert path.read_bytes() == b"x"


def test_file_that_is_mapped_stays_when_it_is_removed(cache, checkpoint):
    files = files_of(cache, checkpoint)
    keep(files)
    states = files.open("slices", FUNCTIONS)
    cache.clean()
    assert all(same(states[name], STATES[name]) for name in STATES)


def test_starts_alike_know_their_files(cache, checkpoint, monkeypatch):
    monkeypatch.setattr("labinfer.weights.weight_cache.code_digest", lambda: "1")
    path = keep(files_of(cache, checkpoint))
    digest = checkpoint_digest(checkpoint)
    assert cache.written_with(digest, "o") == [path]
    assert not cache.written_with(digest, "p") and not cache.written_with("x", "o")
    monkeypatch.setattr("labinfer.weights.weight_cache.code_digest", lambda: "2")
    assert not WeightCache(cache.folder, 1 << 30, free_bytes=0).written_with(digest, "o")


def test_weights_that_a_plugin_decodes_are_kept_for_each_version_of_it(cache, checkpoint, monkeypatch, add_part):
    def version(digest: str) -> WeightCache:
        monkeypatch.setattr(PLUGINS, "loaded", [PluginSource("test", "test.py", digest)])
        return WeightCache(cache.folder, 1 << 30, free_bytes=0)

    add_part("batch_policy", "ideas", len)
    assert version("1").code == version("2").code == cache.code
    add_part("weight_format", "ideas", len)
    path = keep(files_of(version("1"), checkpoint, code=version("1").code))
    assert version("1").written_with(checkpoint_digest(checkpoint), "o") == [path]
    assert not version("2").written_with(checkpoint_digest(checkpoint), "o")


def test_folders_on_networks_are_not_written_to(cache, checkpoint, monkeypatch, tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"a / ext4 rw 0 0\nb {tmp_path}/my\\040home nfs4 rw 0 0\nc {tmp_path}/my\\040home/fast xfs rw 0 0\n"
    )
    assert network_file_system(tmp_path / "my home" / "x", mounts) == "nfs4"
    assert network_file_system(tmp_path / "my home" / "fast", mounts) == ""
    assert network_file_system(tmp_path / "my homes", mounts) == ""
    monkeypatch.setattr("labinfer.weights.weight_cache.network_file_system", lambda folder: "nfs4")
    with pytest.raises(NoRoom, match="nfs4"):
        cache.make_room(1)


@pytest.mark.parametrize("changed", ["checkpoint", "code", "settings", "slices"])
def test_file_of_something_else_under_the_name_that_is_asked_for_is_not_used(cache, checkpoint, caplog, changed):
    """As a restored or copied folder may have it: the header is compared, not the name."""
    files = files_of(cache, checkpoint)
    path = keep(files)
    if changed == "slices":
        asked = "other slices"
    else:
        files, asked = dataclasses.replace(files, **{changed: "other"}), "slices"
    path.rename(files.path(asked))
    if changed in ("checkpoint", "code"):
        assert not WeightCache(cache.folder, GIB, free_bytes=0).knows(files.checkpoint)
    assert files.open(asked, FUNCTIONS) is None
    assert f"it was made from other {changed}: all of {checkpoint}" in caplog.text
    assert not files.path(asked).exists() and files.open(asked, FUNCTIONS) is None


@pytest.mark.parametrize("kind", ["FIFO", "symbolic link", "directory", "another user's"])
def test_what_is_no_file_of_this_user_is_neither_waited_for_nor_used(cache, checkpoint, tmp_path, caplog, kind):
    files = files_of(cache, checkpoint)
    path = keep(files)
    path.rename(tmp_path / "moved")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "symbolic link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "directory":
        path.mkdir()
    else:
        if os.geteuid():
            pytest.skip("only root gives files to others")
        shutil.copy(tmp_path / "moved", path)
        os.chown(path, 12345, 12345)
    assert try_header(path) is None and not cache.knows(files.checkpoint)
    assert files.open("slices", FUNCTIONS) is None and "are ignored" in caplog.text
    keep(files)
    if kind != "directory":
        assert files.open("slices", FUNCTIONS) is not None and len(list(cache.folder.iterdir())) == 1
    assert cache.clean() > 0 or kind == "directory"


@pytest.mark.parametrize("kind", ["FIFO", "symbolic link"])
def test_what_stands_where_a_file_is_to_be_written_is_removed(cache, checkpoint, tmp_path, kind):
    files = files_of(cache, checkpoint)
    cache.folder.mkdir()
    unfinished = files.path("slices").with_suffix(".unfinished")
    if kind == "FIFO":
        os.mkfifo(unfinished)
    else:
        (tmp_path / "precious").write_text("x")
        unfinished.symlink_to(tmp_path / "precious")
    keep(files)
    assert files.open("slices", FUNCTIONS) is not None
    assert kind == "FIFO" or (tmp_path / "precious").read_text() == "x"


def test_two_flipped_bits_do_not_cancel_in_a_checksum():
    words_W = torch.randint(-(1 << 62), 1 << 62, (64,), generator=torch.Generator().manual_seed(1))
    expected = FUNCTIONS.checksum(words_W.view(torch.uint8))
    for first, second in ((0, 1), (0, 63), (31, 32)):
        for bits in ((63, 63), (0, 0), (63, 31), (32, 0)):
            changed_W = words_W.clone()
            for place, bit in zip((first, second), bits, strict=True):
                changed_W[place] ^= torch.tensor(1) << bit
            assert FUNCTIONS.checksum(changed_W.view(torch.uint8)) != expected


def test_header_is_none_where_there_is_no_file(tmp_path):
    assert try_header(tmp_path / "nothing") is None


def test_checksums_are_those_of_plain_torch(compiled_functions):
    from labinfer.functions.cpu.loading import CpuLoading

    bytes_B = torch.randint(0, 256, (8 * 12345,), dtype=torch.uint8)
    expected = FUNCTIONS.checksum(bytes_B)
    assert CpuLoading(compiled_functions).checksum(bytes_B) == expected
    words = [int.from_bytes(bytes(bytes_B[i : i + 8].tolist()), "little") for i in range(0, len(bytes_B), 8)]
    assert expected == sum((word ^ word >> 32) * (2 * i + 1) for i, word in enumerate(words)) % (1 << 64)
