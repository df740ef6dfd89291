"""The Dockerfile and the Apptainer recipe: their install lines in a clean root of another Debian release, and LABInfer in it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from installed import run
from launchers import ROOT
from root_images import build_apptainer, build_docker, make_base, needs_root_images, python_of

TORCH = "torch==2.13.0"
pytestmark = [pytest.mark.slow, needs_root_images]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "root")


@pytest.fixture(scope="module")
def wheels(base, wheel, tmp_path_factory) -> Path:
    """The wheels that pip takes for the Python of the base: there is no package index inside."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary",
        ":all:",
        "--python-version",
        python_of(base),
    ]
    run([*pip, "--dest", folder, TORCH, "setuptools>=68", "modelscope-hub", f"{wheel}[mpi]"])
    (folder / wheel.name).unlink()  # the image builds its own
    return folder


def test_docker_image(base, wheels, processor, tmp_path):
    arguments = {"TORCH_INDEX": "", "TARGETS": processor}
    image = build_docker(ROOT / "Dockerfile", ROOT, base, tmp_path, wheels, arguments)
    assert image.run("id --user --name").strip() == "labinfer"
    assert image.run("command -v g++ || echo none").strip() == "none"
    shutil.copy(ROOT / "tools/smoke_test.py", image.root / "opt/smoke_test.py")
    said = image.run("python3 /opt/smoke_test.py /opt/labinfer", network=False)
    assert said.count(": ok") == 3
    assert image.entry == ["labinfer"]
    server, health = (shlex.join(words) for words in (image.entry + image.command, image.health))
    script = (
        f"{server} & until {health}; do kill -0 $!; sleep 1; done 2>/dev/null; kill -TERM $!; wait $!; echo status $?"
    )
    assert "status 143" in image.run(f"{{ {script}; }}", network=False)
    with pytest.raises(AssertionError, match="refused"):
        image.run(health, network=False)


def test_apptainer_image(base, wheels, processor, tmp_path):
    arguments = {"TARGETS": processor}
    recipe = ROOT / "docs/operations/labinfer.def"
    image = build_apptainer(recipe, ROOT, base, tmp_path, wheels, arguments)
    shutil.copy(ROOT / "tools/smoke_test.py", image.root / "opt/smoke_test.py")
    assert image.run("python3 /opt/smoke_test.py /opt/labinfer", network=False).count(": ok") == 3
    assert "42" in image.run('labinfer --prompt "17 + 25 = ?" --temperature 0', network=False)
