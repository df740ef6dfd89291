"""Libraries compiled at the first run: once for a source, and a reason where they cannot be."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from pathlib import Path

import pytest

from labinfer.native import compiler

pytestmark = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path) -> Path:
    """One function over a number from a header."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int ANSWER = 42;\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return folder


def test_library_is_built_once_and_another_source_makes_another(tmp_path, sources):
    cache = tmp_path / "cache"
    path = compiler.build("answer", sources, cache)
    changed = path.stat().st_mtime_ns
    assert compiler.build("answer", sources, cache) == path and path.stat().st_mtime_ns == changed
    (sources / "answer.h").write_text("constexpr int ANSWER = 43;\n")
    other = compiler.build("answer", sources, cache)
    assert [ctypes.CDLL(str(library)).answer() for library in (path, other)] == [42, 43]
    assert compiler.build("answer", sources, cache, ["-O1"]) not in (path, other)
    assert [found.suffix for found in cache.iterdir()] == [".so"] * 3  # nothing unfinished is left


def test_what_killed_compilations_left_is_removed_when_it_is_old(tmp_path, sources):
    old, young = (tmp_path / f"{compiler.UNFINISHED}{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "answer.o").touch()
    os.utime(old, (0, 0))
    compiler.build("answer", sources, tmp_path)
    assert young.exists() and not old.exists()


def test_progress_is_told_from_none_to_all_files_and_only_while_something_is_compiled(tmp_path, sources):
    (sources / "question.cpp").write_text('extern "C" int question() { return 6 * 7; }\n')
    told: list[tuple[int, int]] = []
    path = compiler.build("answer", sources, tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, 2) and told[-1] == (2, 2) and told == sorted(told)
    library, count = ctypes.CDLL(str(path)), len(told)
    assert library.answer() == library.question() == 42
    compiler.build("answer", sources, tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert len(told) == count


def test_why_it_cannot_be_built_is_said(tmp_path, sources, monkeypatch):
    (sources / "broken.cpp").write_text("int main( {")
    with pytest.raises(compiler.NoCompiler, match="failed: .*error"):
        compiler.build("answer", sources, tmp_path / "cache")
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(compiler.NoCompiler, match=r"there is no C\+\+ compiler \(no-such-compiler\)"):
        compiler.build("answer", sources, tmp_path / "cache")


def test_place_that_cannot_be_made_is_named(tmp_path, sources):
    (tmp_path / "file").touch()
    with pytest.raises(compiler.NoCompiler, match="file/cache, where libraries are kept, cannot be made"):
        compiler.build("answer", sources, tmp_path / "file" / "cache")


def test_user_without_a_home_has_no_place_for_one(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(compiler.NoCompiler, match="no place .* home directory"):
        compiler.default_cache()


def test_library_that_somebody_else_may_have_written_is_not_run(tmp_path, sources):
    cache, mask = tmp_path / "cache", os.umask(0o002)  # under which everything is writable by the group
    try:
        path = compiler.build("answer", sources, cache)
    finally:
        os.umask(mask)
    assert compiler.build("answer", sources, cache) == path
    for bit in (0o020, 0o002):
        path.write_bytes(b"forged")
        path.chmod(0o700 | bit)
        cache.chmod(0o755 | bit)
        assert compiler.build("answer", sources, cache) == path
        assert path.read_bytes().startswith(b"\x7fELF") and path.stat().st_mode & 0o777 == 0o700
        assert cache.stat().st_mode & 0o022 == 0
    fields = list(os.stat(path))
    fields[stat.ST_UID] = os.geteuid() + 1
    with pytest.raises(compiler.NoCompiler, match=f"{path} belongs to user {os.geteuid() + 1}"):
        compiler._check_owner(path, os.stat_result(fields))
