"""``launch.py check-device``: compares every function, capture and collective of a device with the reference on the CPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from itertools import product
from operator import attrgetter

import msgspec
import torch

import labinfer
from labinfer.base.errors import ExitStatus, UserError
from labinfer.base.plugins import PLUGINS
from labinfer.cli.bench.options import CheckDeviceOptions
from labinfer.cli.commands.session import Session
from labinfer.comm.spmd.devices import resolve_devices, torch_device
from labinfer.functions.calls import CallSetting
from labinfer.functions.protocol_calls import protocol_calls
from labinfer.functions.trial import Finding
from labinfer.launch.cgroup_limits import describe_hardware
from labinfer.launch.collectives_trial import try_collectives
from labinfer.launch.providers import GROUP_SIZE, describe_device
from labinfer.launch.trial import TrialOutcome, try_in_process
from labinfer.launch.trial_process import CallSpec, SettingSpec, TrialRequest
from labinfer.observe.output_file import STANDARD, OutputFile, tell_written
from labinfer.observe.progress_line import Ticker
from labinfer.observe.table import format_table

SECONDS = 400.0
"""Seconds after which a process that runs trials tries each remaining implementation with one case only."""
LIMIT = 550.0
"""Timeout in seconds of all trials together."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADER = ("function", "implementation", "weights", "dtypes", "cases", "speed", "result")
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Short names of dtypes in the table, so that it fits a terminal of 80 columns."""
SLOW = 0.8
"""Speed, relative to the reference, below which the table calls an implementation slower."""


def run(session: Session, own: CheckDeviceOptions) -> int:
    """Print one row for each function, implementation and result. Returns 0 if all implementations were tried and work."""
    group = session.join()
    with group.raise_on_all_ranks():
        if group.size > 1:
            raise UserError(
                f"check-device runs on one rank, not on {group.size}, and starts a second process itself if there are two "
                "devices; start it without a launcher"
            )
        given = session.options.parallel.device
        if len(given) > 1:
            raise UserError(f"--device {','.join(given)}: check-device tries one device; give one value")
        name = resolve_devices({0: given[0]}, group.everyone)[0]
        file = OutputFile(own.json, "--json") if own.json else None
    device = torch_device(name)
    with contextlib.closing(Ticker(lambda: "trying functions")):
        outcome = try_in_process(make_request(device), LIMIT)
        findings = [*outcome.findings, *([cut_off_finding(device, outcome)] if outcome.problem else [])]
        if device.type == "cpu" or group.everyone[0].num_accelerators > 1:
            findings += try_collectives(device.type)
    problems = [finding for finding in findings if finding.verdict != "works"]
    num_untried = sum(finding.verdict == "not tried" for finding in findings)
    hardware = describe_hardware(group, device)
    lines = [
        f"{device}: {hardware}; torch {torch.__version__}, LABInfer {labinfer.__version__}",
        findings_table(findings),
        f"{len(findings)} cases, {num_untried} of them not tried, {len(problems) - num_untried} of them fail",
    ]
    OutputFile(STANDARD).write("\n\n".join(lines) + "\n")
    if file is not None:
        report = {
            "device": str(device),
            "hardware": hardware,
            "torch": torch.__version__,
            "labinfer": labinfer.__version__,
            "plugins": PLUGINS.identities(),
            "findings": msgspec.to_builtins(findings),
        }
        file.begin()
        file.write(json.dumps(report, indent=1) + "\n")
        tell_written(own.json)
    group.close()
    return ExitStatus.SOME_FAILED if problems else ExitStatus.OK


def make_request(device: torch.device) -> TrialRequest:
    """Request for trials of every function, KV cache dtype and block size on ``device``."""
    sizes = sorted({16, describe_device(device.type).block_size})
    tiled = (False, True) if device.type == "cpu" else (False,)
    settings = [
        SettingSpec.from_setting(
            CallSetting(device=device, dtype=dtype, kv_dtype=kv_dtype, block_size=size, tiled_cache=is_tiled)
        )
        for dtype, size, is_tiled in product(DTYPES, sizes, tiled)
        for kv_dtype in (dtype, torch.int8)
    ]
    return TrialRequest(
        device=str(device),
        settings=settings,
        calls=[CallSpec.from_call(call) for call in protocol_calls()],
        group_size=GROUP_SIZE,
        plugins=PLUGINS.loaded,
        tries_all=True,
        seconds=SECONDS,
    )


def cut_off_finding(device: torch.device, outcome: TrialOutcome) -> Finding:
    """Finding "not tried" for the cases that did not run because the trials on ``device`` ended early."""
    done = f"cut off after {len(outcome.findings)} of {outcome.num_cases} cases" if outcome.num_cases else "not begun"
    return Finding(
        function="all",
        name=device.type,
        quantization="none",
        dtype="-",
        kv_dtype="-",
        rows=0,
        verdict="not tried",
        detail=f"{done}, {outcome.problem}",
    )


def findings_table(findings: Sequence[Finding]) -> str:
    """Table with a row for each implementation and verdict, and below the table a line for each row that has a detail."""
    rows: dict[tuple, list[Finding]] = {}
    for finding in findings:
        rows.setdefault((finding.key, finding.verdict), []).append(finding)
    table = format_table(HEADER, [_row(group) for group in rows.values()])
    details = [_describe(group[0]) for group in rows.values() if group[0].detail]
    return "\n\n".join([table, *(["\n".join(details)] if details else [])])


def _describe(finding: Finding) -> str:
    """Line below the table: function, implementation, quantization (if any) and verdict of ``finding``, then its detail."""
    subject = " ".join((finding.function, finding.name, *[finding.quantization] * (finding.quantization != "none")))
    tokens = f", for {finding.rows} tokens" if finding.verdict == "wrong" else ""
    return f"{subject}: {finding.verdict}: {finding.detail}{tokens}"


def _row(findings: Sequence[Finding]) -> tuple[object, ...]:
    """Cells of the table for ``findings`` of one implementation with one verdict."""
    first = findings[0]
    dtypes = [DTYPE_NAMES.get(dtype, dtype) for dtype in dict.fromkeys(map(attrgetter("dtype"), findings))]
    own, reference = (sum(map(attrgetter(name), findings)) for name in ("seconds", "reference_seconds"))
    speed = reference / own if own and not first.name.startswith("reference") else 0.0
    return (
        first.function,
        first.name,
        first.quantization,
        "all" if len(dtypes) == len(DTYPE_NAMES) else " ".join(dtypes),
        len(findings),
        f"{speed:.3g}x" if speed else "-",
        "slower" if first.verdict == "works" and 0 < speed < SLOW else first.verdict,
    )
