"""Libraries that came with the package: which one a machine takes, and what it does where none suits."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from labinfer.native import compiler, targets
from labinfer.native.cache_file import write_sealed
from labinfer.native.targets import TARGETS, Target

pytestmark = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def target() -> Target:
    """The best for this machine."""
    found = next((target for target in TARGETS if target.runs_here()), None)
    return found or pytest.skip("nothing is compiled beforehand for this machine")


@pytest.fixture
def sources(tmp_path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    return folder


@pytest.fixture
def prebuilt(tmp_path, monkeypatch) -> Path:
    """The package's folder of such libraries, still empty; the cache may not be used."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(compiler, "PREBUILT", folder)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    return folder


def test_library_of_the_package_needs_no_compiler_and_no_home(sources, prebuilt, target, monkeypatch):
    path = compiler.build_prebuilt("answer", sources, prebuilt, ["-pthread"], target)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    library = compiler.load("answer", sources, None, ["-pthread"])
    assert library._name == str(path) and library.answer() == 42 and path.stat().st_mode & 0o777 == 0o755
    assert [found.name for found in prebuilt.iterdir()] == [path.name]  # nothing unfinished is left


def test_library_of_other_sources_or_flags_is_not_taken(sources, prebuilt, target):
    compiler.build_prebuilt("answer", sources, prebuilt, ["-pthread"], target)
    with pytest.raises(compiler.NoCompiler, match="no directory for compiled libraries"):
        compiler.load("answer", sources, None, ["-O1"])
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    with pytest.raises(compiler.NoCompiler, match="no directory for compiled libraries"):
        compiler.load("answer", sources, None, ["-pthread"])


def test_library_that_cannot_be_loaded_is_compiled_here(sources, prebuilt, target, tmp_path, caplog):
    path = compiler.build_prebuilt("answer", sources, prebuilt, [], target)
    write_sealed(path, b"of a newer system")
    library = compiler.load("answer", sources, tmp_path / "cache")
    assert Path(library._name).parent == tmp_path / "cache" and library.answer() == 42
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("size", [0, 1000, -1])
def test_library_of_the_package_that_is_damaged_is_named_and_compiled_here(
    sources, prebuilt, target, tmp_path, caplog, size
):
    path = compiler.build_prebuilt("answer", sources, prebuilt, [], target)
    path.write_bytes(path.read_bytes()[:size])
    library = compiler.load("answer", sources, tmp_path / "cache")
    assert Path(library._name).parent == tmp_path / "cache" and library.answer() == 42
    (line,) = caplog.messages
    assert f"{path}, which is part of LABInfer, is ignored" in line and "reinstall the wheel" in line


def test_each_machine_takes_the_best_that_it_can_run(sources, prebuilt, target, tmp_path, monkeypatch):
    same = [other for other in TARGETS if other.machine == target.machine]
    paths = {other.name: compiler.build_prebuilt("answer", sources, prebuilt, [], other) for other in same}
    for other in same:
        line = f"processor : 0\nflags : fpu {' '.join(sorted(other.features))}\nflags : fewer\n"
        (tmp_path / "cpuinfo").write_text(line)
        monkeypatch.setattr(targets, "CPUINFO", tmp_path / "cpuinfo")
        assert compiler.load("answer", sources)._name == str(paths[other.name])
    (tmp_path / "cpuinfo").write_text("Features : asimd fp\n")
    with pytest.raises(compiler.NoCompiler, match="no directory for compiled libraries"):
        compiler.load("answer", sources)


def test_library_for_a_target_is_taken_before_the_best(sources, prebuilt, target):
    other = next((each for each in reversed(TARGETS) if each.runs_here() and each != target), None)
    if other is None:
        pytest.skip("this machine runs what is compiled for one target only")
    paths = [compiler.build_prebuilt("answer", sources, prebuilt, [], each) for each in (target, other)]
    loaded = [compiler.load("answer", sources, target=each)._name for each in (target, other)]
    assert loaded == list(map(str, paths))


def test_targets_are_ordered_from_the_one_with_most_instructions():
    for machine in ("x86_64", "aarch64"):
        same = [target for target in TARGETS if target.machine == machine]
        assert not any(one.features < other.features for i, one in enumerate(same) for other in same[i + 1 :])
