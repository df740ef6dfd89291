"""The printed tree names every file with what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "tools/tree.py", *arguments], capture_output=True, text=True)


def test_whole_tree_has_every_python_file():
    names = [line.split()[0] for line in run().stdout.splitlines()]
    files = [path.name for path in (ROOT / "labinfer").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(name for name in names if name.endswith(".py")) == sorted(files)
    assert not any("vendor" in name for name in names)


def test_one_package_is_printed_with_first_lines():
    lines = run("worker").stdout.splitlines()
    first, state = (
        (ROOT / "labinfer/worker" / name).read_text(encoding="utf-8").splitlines()[0].strip('"')
        for name in ("__init__.py", "sequence_state.py")
    )
    assert len(first) > 20 and lines[0].startswith(f"labinfer/worker/ {first[:100]}")
    assert any(line.split(maxsplit=1) == ["sequence_state.py", state] for line in lines)
    assert all(len(line) <= 160 for line in lines)


def test_unknown_package_is_refused_in_one_line():
    done = run("nowhere")
    assert done.returncode == 2 and done.stderr == "there is no package nowhere in labinfer/\n"
