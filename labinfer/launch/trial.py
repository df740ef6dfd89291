"""Trials at the start: implementations of plugins and accelerators that fail are dropped by name, and the run goes on without them."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.plugins import PLUGINS
from labinfer.comm.spmd.accelerator import hardware_name
from labinfer.functions.calls import CallSetting, FunctionCall
from labinfer.functions.drop import drop_with_layout
from labinfer.functions.protocol_calls import protocol_calls
from labinfer.functions.provider import Provider
from labinfer.functions.registry import FunctionRegistry, WeightChoice
from labinfer.functions.trial import TRIED_ROWS, Finding, Trials, is_tried, make_cases
from labinfer.launch.providers import reference_registry
from labinfer.launch.trial_process import CallSpec, SettingSpec, TrialMessage, TrialRequest, run_cases
from labinfer.native.cache_file import Damaged, digest, locked, read_sealed, write_sealed

logger = logging.getLogger(__name__)

FORM = 1
"""Version of the trials and of their files. Files of other versions are not used."""
SECONDS = 2.0
"""Time budget in seconds of the trials at a start, beyond which each implementation has one case."""
LIMIT = 60.0
"""Seconds after which the process that tries is given up."""

Key = tuple[str, str, str]
"""Function, implementation and quantization."""


class TrialRecord(msgspec.Struct, frozen=True):
    """Result of the trials of one device, model and set of versions."""

    tried: list[Key]
    failed: list[Finding]


def drop_failing(
    registry: FunctionRegistry,
    setting: CallSetting,
    model_calls: Iterable[FunctionCall],
    *,
    providers: Sequence[Provider],
    group_size: int,
    weights: WeightChoice,
    overrides: Mapping[str, str],
    cache: Path | None,
    anew: bool = False,
) -> None:
    """Remove implementations that fail from ``registry``, each with a warning. Results are cached by device, model and versions, so
    only the first start takes time.

    Implementations are first run in another process, see ``trial_process``; those that it cannot have, such as functions of the
    calling program, in this one.

    Args:
        model_calls: calls of this rank's layers.
        overrides: implementation names by function.
        cache: folder of cached results; None to try at each start.
        anew: whether to ignore cached results.

    Raises:
        UserError: ``overrides`` names an implementation that fails.
    """
    if not any(is_tried(item, setting.device) for item in registry.implementations):
        return
    calls = [*dict.fromkeys(model_calls), *protocol_calls()]
    cases = list(make_cases(registry, [setting], calls))
    request = TrialRequest(
        device=str(setting.device),
        settings=[SettingSpec.from_setting(setting)],
        calls=[CallSpec.from_call(call) for call in calls],
        group_size=group_size,
        weights=weights,
        plugins=PLUGINS.loaded,
        seconds=SECONDS,
    )
    implementation_keys = list(dict.fromkeys(case.finding("works").key for case in cases))
    circumstances = (
        (FORM, labinfer.__version__, torch.__version__, TRIED_ROWS, _hardware(setting.device)),
        [provider.fingerprint() for provider in providers],
        (PLUGINS.computing_code(), request.settings, request.calls, group_size, weights, implementation_keys),
    )
    path = None if cache is None else cache / f"trials-{digest(*circumstances)}.json"

    def try_all() -> TrialRecord:
        findings = try_in_process(request, LIMIT)
        tried = {finding.key for finding in findings}
        rest = [case for case in cases if case.finding("works").key not in tried]

        def keep(message: TrialMessage) -> None:
            if message.has_ended:
                findings.append(message.finding)

        run_cases(rest, Trials(reference_registry(group_size, weights)), keep, seconds=SECONDS)
        failed = {finding.key: finding for finding in reversed(findings) if finding.verdict != "works"}
        return TrialRecord(sorted({finding.key for finding in findings}), list(reversed(failed.values())))

    for finding in _remembered(path, implementation_keys, try_all, anew).failed:
        removed = drop_with_layout(registry, *finding.key)
        if any(overrides.get(function) == name for function, name in removed):
            raise UserError(f"--functions {finding.text}; fix it, or leave it out")
        logger.warning("kernel dropped, the reference is used: %s", finding.text)
        if others := ", ".join(f"{function}={name}" for function, name in removed[1:]):
            logger.warning("kernels dropped that read or pack weights for %s=%s: %s", *finding.key[:2], others)


def _remembered(
    path: Path | None, implementation_keys: Sequence[Key], make: Callable[[], TrialRecord], anew: bool
) -> TrialRecord:
    """The record in a cache file, or else a new one, which is kept there. One process at a time makes it."""
    if path is not None and not anew and (record := _read(path, implementation_keys)) is not None:
        return record
    logger.info("trying the kernels of this device and of plugins once")
    if path is None:
        return make()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock"), LIMIT, lambda: logger.debug("another process tries these kernels")):
        if not anew and (record := _read(path, implementation_keys)) is not None:
            return record
        record = make()
        try:
            write_sealed(path, msgspec.json.encode(record))
        except OSError as error:
            logger.info("the results of the trials could not be saved: %s", error)
        return record


def _read(path: Path, implementation_keys: Sequence[Key]) -> TrialRecord | None:
    """A cached record; None without one that has all ``implementation_keys`` implementations."""
    try:
        record = msgspec.json.decode(read_sealed(path), type=TrialRecord)
        return record if set(implementation_keys) <= set(record.tried) else None
    except FileNotFoundError:
        return None
    except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is ignored (%s); the kernels are tried again", path, error)
        return None


def try_in_process(request: TrialRequest, limit: float) -> list[Finding]:
    """Findings of another process, which runs the cases of ``request``; those that it had after ``limit`` seconds."""
    command = [sys.executable, "-m", "labinfer.launch.trial_process"]
    folder = Path(labinfer.__file__).parent.parent  # so that the process finds this package
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                input=msgspec.json.encode(request),
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=limit,
                check=False,
            )
            output, problem = done.stdout, f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            output, problem = error.stdout or b"", f"no end within {limit:g} s"
        except OSError as error:
            output, problem = b"", str(error)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    lines = output.split(b"\n")[:-1]  # the last one may be incomplete
    if problem or not lines:
        logger.info("the process that tries kernels: %s", " ".join([problem, *said[-1:]]).strip() or "no result")
    return [msgspec.json.decode(line, type=Finding) for line in lines]


def _hardware(device: torch.device) -> str:
    """Type and product name of an accelerator; empty for CPUs, which providers name in their fingerprints."""
    return "" if device.type == "cpu" else f"{device.type} {hardware_name(device)}"
