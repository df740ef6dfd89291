"""``launch.py check-device``: its table and its file, on a CPU with and without planted faults, and on the make-believe accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from launchers import LAUNCH, run
from planted_faults import READERS

from labinfer.cli.commands.check_device import HEADER, cut_off_finding, findings_table, make_request
from labinfer.functions.registry import FUNCTIONS
from labinfer.functions.trial import Finding
from labinfer.launch.trial import TrialOutcome

PLANTED = f'''"""Implementations that are wrong by 1 %."""

import sys

sys.path.insert(0, {str(Path(__file__).parents[1])!r})

from planted_faults import plant

from labinfer import register
from labinfer.functions.provider import Provider
from labinfer.functions.registry import FUNCTIONS
from labinfer.launch.providers import reference_registry


@register("function_provider", "planted")
class Planted(Provider):
    def register(self, registry, group_size):
        for function in FUNCTIONS:
            plant(registry, reference_registry(group_size), function, "int8" if function == "pack_codes" else "none")
'''
RAISING = '''"""A provider that raises when it is prepared in a fork of the process that tries functions."""

import os

from labinfer import register
from labinfer.functions.provider import Provider

LOADED_IN = os.getpid()


@register("function_provider", "raising")
class Raising(Provider):
    def prepare(self, device, on_progress=None):
        if os.getpid() != LOADED_IN:
            raise ValueError("in a fork")

    def register(self, registry, group_size):
        pass
'''


def check(*flags: object, **env: str) -> tuple[int, list[str], list[Finding]]:
    """Exit status, lines and findings of the command."""
    file = Path(str(flags[0]))
    done = run("single", 1, LAUNCH, "check-device", "--json", *flags, timeout=600, **env)
    assert file.exists(), done.text
    report = json.loads(file.read_text())
    return done.returncode, done.stdout.splitlines(), msgspec.convert(report["findings"], list[Finding])


def finding(verdict: str, **changes) -> Finding:
    fields = {"function": "linear", "name": "own", "quantization": "int8", "dtype": "float32", "kv_dtype": "float32"}
    return Finding(**{**fields, "rows": 3, "verdict": verdict, **changes})


def test_table_has_a_row_for_each_result_of_an_implementation():
    findings = [
        finding("works", seconds=2.0, reference_seconds=1.0),
        finding("works", dtype="float16", seconds=2.0, reference_seconds=1.0),
        finding("wrong", dtype="bfloat16", detail="differs from the reference by a factor of 1.010"),
        finding("hangs", function="silu_and_mul", detail="no result within 5 s"),
        finding("works", function="capture", detail="not captured"),
    ]
    lines = findings_table(findings).splitlines()
    assert [line.split() for line in (lines[0], lines[2])] == [
        list(HEADER),
        [
            "linear",
            "own",
            "int8",
            "fp32",
            "fp16",
            "2",
            "0.5x",
            "slower",
        ],
    ]
    assert [line.split()[-1] for line in lines[3:6]] == ["wrong", "hangs", "works"]
    assert lines[6:] == [
        "",
        "linear own int8: wrong: differs from the reference by a factor of 1.010, for 3 tokens",
        "silu_and_mul own int8: hangs: no result within 5 s",
        "capture own int8: works: not captured",
    ]


@pytest.mark.parametrize("name", ["reference", "reference-packed12"])
def test_plain_code_has_no_speed(name):
    """Every device has it, so a table that called it slower would ask its vendor for nothing."""
    row = findings_table([finding("works", name=name, seconds=5.0, reference_seconds=1.0)]).splitlines()[2]
    assert row.split()[-2:] == ["-", "works"]


def test_table_of_the_longest_names_fits_eighty_columns():
    findings = [
        finding("crashes", function="latent_attention", name="reference-packed12", quantization="int4/32", dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
        for _ in range(36)
    ]
    assert max(map(len, findings_table(findings).splitlines())) <= 80
    assert findings_table(findings).splitlines()[2].split()[3:5] == ["all", "108"]


def test_settings_are_those_of_the_device():
    device = torch.device("cpu")
    settings = [spec.on(device) for spec in make_request(device).settings]
    assert {setting.tiled_cache for setting in settings} == {False, True}
    assert {(setting.dtype, setting.kv_dtype) for setting in settings} == {
        (dtype, kv_dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for kv_dtype in (dtype, torch.int8)
    }


@pytest.mark.slow
def test_faults_of_every_function_are_in_the_table(tmp_path):
    plugin = tmp_path / "planted.py"
    plugin.write_text(PLANTED)
    status, lines, findings = check(tmp_path / "found.json", "--device", "cpu", "--plugin", plugin)
    assert status == 1 and f"{len(findings)} cases" in lines[-1]
    failed = {each.key[:2] for each in findings if each.verdict not in ("works", "not tried")}
    captures = {each.verdict for each in findings if each.function == "capture"}
    assert captures == {"raises"}  # the layout of the planted pack_codes has no pack_weight, so no step can be selected
    failed = {key for key in failed if key[0] != "capture"}
    assert failed == {(READERS.get(function, function), f"planted-{function}") for function in FUNCTIONS}
    for function, name in failed:
        assert any(line.startswith(function) and name in line and "wrong" in line for line in lines)


@pytest.mark.slow
def test_everything_that_ships_works_on_this_cpu(tmp_path):
    status, lines, findings = check(tmp_path / "found.json", "--device", "cpu")
    assert [each.text for each in findings if each.verdict != "works"] == [] and status == 0
    functions = {each.function for each in findings}
    assert functions | READERS.keys() == {*FUNCTIONS, "capture", "all_reduce", "all_gather", "send"}
    assert lines[-1].endswith(" 0 of them fail")


COLLECTIVES = """
from labinfer.launch.collectives_trial import try_collectives

for finding in try_collectives("npu"):
    print(finding.function, finding.name, finding.verdict, finding.detail)
"""


def test_collectives_of_two_cards_work(fake_device):
    """The group of the make-believe cards has gloo's limits: it gathers no stack, but a concatenation."""
    env = os.environ | fake_device("npu", "no-float64", "late-copies")
    done = subprocess.run([sys.executable, "-c", COLLECTIVES], env=env, capture_output=True, text=True, timeout=120)
    assert {line.strip() for line in done.stdout.splitlines()} == {
        f"{name} hccl works" for name in ("all_reduce", "all_gather", "send")
    }, done.stdout + done.stderr


def test_several_ranks_are_refused():
    done = run("mpirun", 2, LAUNCH, "check-device", "--device", "cpu")
    (line,) = done.our_errors
    assert done.returncode == 2 and "check-device runs on one rank, not on 2" in line


def test_trials_that_were_cut_off_fail():
    outcome = TrialOutcome(findings=[finding("works")], keys=set(), num_cases=9, problem="no time")
    found = cut_off_finding(torch.device("cpu"), outcome)
    assert found.verdict == "not tried" and found.detail == "cut off after 1 of 9 cases, no time"


def test_fork_that_raises_between_cases_is_no_success(tmp_path):
    plugin = tmp_path / "raising.py"
    plugin.write_text(RAISING)
    status, lines, findings = check(tmp_path / "found.json", "--device", "cpu", "--plugin", plugin)
    assert status == 1 and any(line.startswith("all") and "ValueError: in a fork" in line for line in lines)


def test_several_devices_are_refused():
    done = run("single", 1, LAUNCH, "check-device", "--device", "cpu,cpu")
    (line,) = done.our_errors
    assert done.returncode == 2 and "--device cpu,cpu: check-device tries one device" in line
