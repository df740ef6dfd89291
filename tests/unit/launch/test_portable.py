"""``--reproducible any-cpu``: which kernels and instructions a rank uses, and which processes it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.comm.spmd.environment import PORTABLE_TORCH
from labinfer.functions.cpu import library
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.launch import portable
from labinfer.launch.portable import TORCH_CAPABILITY, check_portable
from labinfer.native import compiler, targets
from labinfer.native.targets import PORTABLE
from labinfer.native.torch_instructions import MKL_COMPATIBLE, mkl_branch

JOIN = """
import sys, torch
from labinfer.base.config import EngineOptions
from labinfer.comm.group.rank_group import join_group
from labinfer.comm.spmd.environment import detect
group = join_group(detect(), EngineOptions.from_flat({"reproducible": sys.argv[1]}))
group.comm.all_gather_bytes(b"text")
torch.arange(9.0).exp()
print(torch.backends.cpu.get_cpu_capability())
"""
"""Joins a group of one rank, lets torch compute, and prints the instructions that it chose."""


@pytest.fixture
def capability(monkeypatch) -> None:
    """Torch as it is where ``PORTABLE_TORCH`` is set at the start."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: TORCH_CAPABILITY)
    monkeypatch.setattr(portable, "mkl_branch", lambda: MKL_COMPATIBLE)


def write_cpuinfo(tmp_path, monkeypatch, line: str) -> None:
    (tmp_path / "cpuinfo").write_text(line)
    monkeypatch.setattr(targets, "CPUINFO", tmp_path / "cpuinfo")


def test_processor_without_avx2_is_refused(tmp_path, monkeypatch, capability):
    write_cpuinfo(tmp_path, monkeypatch, f"flags : {' '.join(PORTABLE.features - {'avx2', 'fma'})}\n")
    with pytest.raises(
        UserError, match=r"any-cpu needs an x86 processor with AVX2; this one \(.*\) lacks avx2, fma; give --rep"
    ):
        check_portable()


def test_arm_processor_is_refused(tmp_path, monkeypatch, capability):
    write_cpuinfo(tmp_path, monkeypatch, "Features : fp asimd\n")
    monkeypatch.setattr(targets.platform, "machine", lambda: "aarch64")
    with pytest.raises(UserError, match=r"this one \(aarch64\) lacks abm, avx2"):
        check_portable()


def test_process_in_which_torch_has_used_other_instructions_is_refused(tmp_path, monkeypatch):
    write_cpuinfo(tmp_path, monkeypatch, f"flags : {' '.join(PORTABLE.features)} avx512f\n")
    monkeypatch.setattr(targets.platform, "machine", lambda: PORTABLE.machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    variables = " ".join(f"{name}={value}" for name, value in PORTABLE_TORCH.items())
    with pytest.raises(UserError, match=f"AVX512 instructions in this process before; start it with {variables}"):
        check_portable()


def test_process_in_which_mkl_has_used_other_instructions_is_refused(tmp_path, monkeypatch, capability):
    """On a processor with AVX2 only, torch's instructions do not tell whether the variables were set in time."""
    write_cpuinfo(tmp_path, monkeypatch, f"flags : {' '.join(PORTABLE.features)}\n")
    monkeypatch.setattr(targets.platform, "machine", lambda: PORTABLE.machine)
    check_portable()
    monkeypatch.setattr(portable, "mkl_branch", lambda: 1)
    with pytest.raises(UserError, match="MKL has computed with other instructions in this process before; start it"):
        check_portable()


@pytest.mark.skipif(mkl_branch() is None, reason="torch was built without MKL")
@pytest.mark.parametrize(("setting", "is_compatible"), [("early", True), ("late", False)])
def test_branch_of_mkl_is_the_one_that_computes(setting, is_compatible):
    code = "import torch; torch.ones(4096).log()" if setting == "late" else "pass"
    program = (
        f"{code}; import os; os.environ['MKL_CBWR'] = 'COMPATIBLE'; from labinfer.native import torch_instructions as t"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print(t.mkl_branch() == t.MKL_COMPATIBLE, t.torch_instructions())"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"{is_compatible} torch with "), done


@pytest.mark.skipif(not PORTABLE.runs_here(), reason="this processor has no AVX2")
def test_torch_uses_avx2_from_the_first_collective_on():
    used = {}
    for value in ("on", "any-cpu"):
        done = subprocess.run([sys.executable, "-c", JOIN, value], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        used[value] = done.stdout.split()[-1]
    assert used["any-cpu"] == TORCH_CAPABILITY
    if "avx512vl" in targets.processor_features():
        assert used["on"] != TORCH_CAPABILITY, "the control: torch would use more"


def test_library_is_that_of_avx2_and_the_fingerprint_leaves_the_processor_out(monkeypatch):
    built = []

    def build(cache=None, on_progress=None, *, target=None, only_ready=False):
        built.append(target)
        raise compiler.NoCompiler("nothing is compiled here")

    monkeypatch.setattr(library, "build", build)
    names = []
    for is_portable in (False, True):
        provider = CpuProvider()
        provider.is_portable = is_portable
        provider.prepare(torch.device("cpu"))
        names.append(provider.fingerprint()[0])
    assert built == [None, PORTABLE]
    assert names == [compiler.processor(), PORTABLE.name]
