"""LABInfer's wheel for this machine's processor, built once for all tests of packages."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from installed import run
from launchers import ROOT

from labinfer.native import compiler
from labinfer.native.targets import TARGETS


@pytest.fixture(scope="session")
def processor() -> str:
    """The best target of ``tools/build_wheel.py`` that runs here."""
    if not any(map(shutil.which, compiler.COMPILERS)):
        pytest.skip("no C++ compiler")
    return next((target.name for target in TARGETS if target.runs_here()), None) or pytest.skip("no target runs here")


@pytest.fixture(scope="session")
def wheel(processor, tmp_path_factory) -> Path:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools would have to be downloaded")
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, ROOT / "tools/build_wheel.py", "--output", folder, "--targets", processor])
    (wheel,) = folder.glob("*.whl")
    return wheel
