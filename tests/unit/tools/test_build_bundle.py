"""The offline bundle: what is in it, and what its script refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/build_bundle.py"


@pytest.fixture(scope="module")
def bundle():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("build_bundle", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(bundle, tmp_path) -> Path:
    """A bundle whose only wheel is an empty file."""
    folder = tmp_path / "labinfer-9.8.7-any"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels" / "labinfer-9.8.7-py3-none-any.whl").write_bytes(b"wheel")
    bundle.add_files(folder, "9.8.7")
    bundle.write_checksums(folder)
    return folder


def install(folder: Path, **env: str) -> subprocess.CompletedProcess:
    command = ["sh", str(folder / "install.sh"), str(folder.parent / "venv")]
    env = os.environ | {"PYTHON": sys.executable} | env
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def test_archive_has_everything_below_one_folder_and_says_nothing_of_its_builder(bundle, folder, tmp_path):
    path = bundle.pack(folder, tmp_path / "dist")
    assert path.name == "labinfer-9.8.7-any.tar"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.removeprefix("labinfer-9.8.7-any/") for member in members}
    assert {"install.sh", "SHA256SUMS", "wheels/labinfer-9.8.7-py3-none-any.whl", "docs/serving.md", "LICENSE"} <= names
    assert {"examples/prompts.jsonl", "README.md", "README.zh-CN.md", "CHANGELOG.md"} <= names
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}


def test_every_file_is_in_the_checksums(folder):
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed == files - {"SHA256SUMS"}
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder).returncode == 0


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_bundle_is_not_installed(damage, folder):
    wheel = next((folder / "wheels").iterdir())
    if damage == "changed":
        wheel.write_bytes(b"other")
    else:
        wheel.unlink()
    done = install(folder)
    assert done.returncode == 1 and "a file of the bundle is missing or damaged" in done.stderr
    assert wheel.name in done.stdout + done.stderr
    assert not (folder.parent / "venv").exists()


def test_other_pythons_are_refused_by_version(folder, tmp_path):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9 riscv64\n")
    other.chmod(0o755)
    done = install(folder, PYTHON=str(other))
    assert done.returncode == 1 and f"{other} is Python 3.9 riscv64, and the wheels are for" in done.stderr
    assert "there is no python0; set PYTHON to" in install(folder, PYTHON="python0").stderr


def test_there_must_be_one_wheel_of_labinfer(bundle, tmp_path):
    with pytest.raises(SystemExit, match="holds 0 wheels of LABInfer, not one: run make wheel"):
        bundle.find_wheel(tmp_path)
    wheel = tmp_path / "labinfer-1.2.3-py3-none-any.whl"
    wheel.touch()
    assert bundle.find_wheel(tmp_path) == wheel and bundle.wheel_version(wheel) == "1.2.3"


def test_files_that_git_does_not_track_are_left_out(bundle, tmp_path, monkeypatch):
    """A user keeps API keys beside the Compose file."""
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    for name in ("docs/serving.md", "docs/keys"):
        (root / name).write_text("text")
    for command in (["init", "-q"], ["add", "docs/serving.md"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(bundle, "ROOT", root)
    assert bundle.tracked_files() == ["docs/serving.md"]
