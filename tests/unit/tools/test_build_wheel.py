"""The wheel with libraries: installed where there is no compiler, the compiled functions run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from labinfer.native import compiler
from labinfer.native.targets import TARGETS

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
import re
from pathlib import Path
from labinfer import LLM, SamplingParams
with LLM("demo", quantization="int8", threads=1) as llm:
    chat = [[{"role": "user", "content": "What is 17 + 25?"}]]
    print(llm.generate(chat, SamplingParams(max_tokens=8))[0].text)
print(*set(re.findall(r"kernels-\S+\.so", Path("/proc/self/maps").read_text())))  # mapped from memory, by the file's name
"""


@pytest.mark.slow
def test_wheel_brings_compiled_functions_to_a_machine_without_a_compiler(tmp_path):
    if not any(map(shutil.which, compiler.COMPILERS)):
        pytest.skip("no C++ compiler")
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools would have to be fetched")
    target = next((target for target in TARGETS if target.runs_here()), None) or pytest.skip("none for this machine")
    run([sys.executable, ROOT / "tools/build_wheel.py", "--output", tmp_path, "--targets", target.name], cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel])
    (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = tmp_path / "home"
    home.mkdir()
    alone = {"PATH": str(python.parent), "HOME": str(home), "LANG": "C.UTF-8"}
    said = run([python, "-c", PROGRAM], cwd=home, env=alone).splitlines()
    prebuilt = site / "labinfer" / "native" / "prebuilt"
    assert said[-2:] == ["42", *(path.name for path in prebuilt.glob("kernels-*.so"))]
    assert not list(home.rglob("*.so"))


def run(command: list, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=270, cwd=cwd, env=env or without
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout
