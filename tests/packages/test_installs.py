"""The wheel and the bundle, installed where nothing else is: each answers, runs a job on two ranks, and serves."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile

import pytest
from hosts import needs_hosts
from installed import run
from launchers import ROOT

TORCH = "torch==2.13.0"
SMOKE_TEST = ROOT / "tools/smoke_test.py"
OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Begin of a command that runs without a network: only the loopback device is up."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def release():
    """tools/check_release.py as a module."""
    spec = importlib.util.spec_from_file_location("check_release", ROOT / "tools/check_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wheel_runs_in_an_empty_environment(release, wheel, tmp_path):
    release.check_metadata(wheel, release.labinfer.__version__)
    release.install(wheel, tmp_path / "environment", TORCH, [])
    said = run([sys.executable, SMOKE_TEST, tmp_path / "environment"])
    assert said.count(": ok") == 3


@needs_hosts
def test_bundle_is_installed_and_runs_without_a_network(wheel, tmp_path):
    run([sys.executable, ROOT / "tools/build_bundle.py", "--wheel", wheel, "--output", tmp_path])
    (bundle,) = tmp_path.glob("*.tar")
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path, filter="data")
    bundle.unlink()
    folder = bundle.with_suffix("")
    environment = tmp_path / "environment"
    said = run([*OFFLINE, "sh", folder / "install.sh", environment], PYTHON=sys.executable)
    assert "installed in" in said
    assert run([*OFFLINE, sys.executable, SMOKE_TEST, environment]).count(": ok") == 3


@needs_hosts
def test_the_namespace_of_these_tests_has_no_network():
    program = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
    done = subprocess.run([*OFFLINE, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "Network is unreachable" in done.stderr
