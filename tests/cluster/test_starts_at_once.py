"""Starts on an empty cache at once: one compiles, the others wait with a line, and all answer."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from launchers import LAUNCH, command, finish, start

from labinfer.functions.cpu import library
from labinfer.native import compiler
from labinfer.native.cache_file import read_sealed

COMPILER = """#!{python}
import pathlib, shutil, sys, time
out = sys.argv[sys.argv.index("-o") + 1]
with open({count!r}, "a") as file:
    file.write("x\\n")
time.sleep(0.5)  # so that others come while it runs
if "-shared" in sys.argv:
    shutil.copy({linked!r}, out)
else:
    pathlib.Path(out).touch()
"""


@pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")
@pytest.mark.parametrize("num_starts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_of_starts_on_an_empty_cache_one_compiles(tmp_path, num_starts):
    """With a compiler that gives out what the real one has made, as that takes a minute."""
    linked, count, home, folder = tmp_path / "linked.so", tmp_path / "count", tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    folder.mkdir()
    linked.write_bytes(read_sealed(Path(library.build()._name)))
    (folder / "g++").write_text(COMPILER.format(python=sys.executable, count=str(count), linked=str(linked)))
    (folder / "g++").chmod(0o755)
    arguments = ("--prompt", "2 + 2 =", "--max-tokens", "4", "--temperature", "0", "--autotune", "off")
    variables = {"HOME": str(home), "PATH": f"{folder}:/usr/bin:/bin"}
    starts = [start(command("single", 1, LAUNCH, *arguments), **variables) for _ in range(num_starts)]
    ended = [finish(each, 300) for each in starts]
    assert [each.returncode for each in ended] == [0] * num_starts, ended
    assert len({each.stdout for each in ended}) == 1 and ended[0].stdout.strip()
    num_files = len(list(library.SOURCES.glob("*.cpp")))
    assert count.read_text() == "x\n" * (num_files + 1)
    waits = [each for each in ended if "another process is compiling" in each.stderr]
    assert len(waits) < num_starts and all("kernels-" in each.stderr for each in waits)
    assert sorted(path.suffix for path in (home / ".cache" / "labinfer").glob("kernels*")) == [".so"]
