"""Starts whose caches are damaged answer as with an empty cache; see ``benchmarks/damaged_caches.py``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labinfer.native import compiler

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "damaged_caches.py"


@pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")
@pytest.mark.parametrize("num_cases", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_caches_change_no_answer(num_cases):
    """In processes that are forked before torch has threads."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--cases",
        str(num_cases),
        "--read-cases",
        str(10 * num_cases),
        "--jobs",
        "2",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120 * num_cases)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{11 * num_cases} cases, 0 of them wrong" in ended.stdout
