"""Trials at the start: implementations of plugins and accelerators that fail are dropped by name, and the run goes on without them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from labinfer.functions.trial import PASSING, TRANSIENT, TRIED_ROWS, Finding, TrialCase, Trials, is_tried, make_cases
from labinfer.launch.json_child import JsonChild
from labinfer.launch.providers import reference_registry
from labinfer.launch.trial_process import (
    FIRST_SECONDS,
    CallSpec,
    CaseList,
    Complete,
    Key,
    Message,
    SettingSpec,
    TrialRequest,
    run_cases,
)
from labinfer.native.cache_file import Damaged, digest, locked, read_sealed, write_sealed

logger = logging.getLogger(__name__)

TRIAL_VERSION = 3
"""Version of the trials (see ``functions.trial``) and of their cached results. Results of other versions are not used."""
SECONDS = 2.0
"""Time budget in seconds of the trials at a start. Beyond it, each implementation is tried in one case only."""
LIMIT = 60.0
"""Timeout of the trial process in seconds."""
ADVICE = {"hangs": "--autotune again gives it another try"} | dict.fromkeys(TRANSIENT, "start again to try it")
"""Advice by verdict, for verdicts that a later trial may change; for others the implementation must be mended."""


class TrialRecord(msgspec.Struct, frozen=True):
    """Results of the trials of one device, model and set of versions."""

    tried: list[Key] = []
    failed: list[Finding] = []
    made: float = 0.0
    """Time of the last trials in seconds since 1970."""

    def lasting(self) -> TrialRecord:
        """The record without results that may differ at the next start."""
        transient = {finding.key for finding in self.failed if finding.verdict in TRANSIENT}
        failed = [finding for finding in self.failed if finding.key not in transient]
        return TrialRecord([key for key in self.tried if key not in transient], failed, self.made)


@dataclass(kw_only=True)
class TrialOutcome:
    """Report of the trial process, in which ``drop_failing`` tries implementations, because these may crash or hang."""

    findings: list[Finding] = field(default_factory=list)
    keys: set[Key] | None = None
    """Implementations that exist in the trial process; None if it ended before it listed them."""
    num_cases: int = 0
    """Number of cases (implementation, dtypes and batch size) that the trial process lists; 0 without ``keys``."""
    problem: str = "it had no result"
    """Why the process did not run all its cases; empty if it did."""


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

    Implementations run in another process, see ``trial_process``. Those that exist only in this process, such as functions of the
    calling program, run here.

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
    if not cases:  # a plugin's implementations may be for other devices
        return
    request = TrialRequest(
        device=str(setting.device),
        settings=[SettingSpec.from_setting(setting)],
        calls=[CallSpec.from_call(call) for call in calls],
        group_size=group_size,
        weights=weights,
        plugins=PLUGINS.loaded,
        seconds=SECONDS,
    )
    keys = list(dict.fromkeys(case.key for case in cases))
    versions = (TRIAL_VERSION, labinfer.__version__, torch.__version__, TRIED_ROWS, _hardware(setting.device))
    fingerprints = [provider.fingerprint() for provider in providers]
    described = (PLUGINS.computing_code(), request.settings, request.calls, group_size, weights, keys)
    path = None if cache is None else cache / f"trials-{digest(versions, fingerprints, described)}.json"

    def try_others(known: Sequence[Key]) -> list[Finding]:
        rest = [case for case in cases if case.key not in known]
        trials = Trials(reference_registry(group_size, weights))
        return _findings(rest, trials, msgspec.structs.replace(request, known=list(known)))

    for finding in _failed(path, keys, try_others, anew=anew):
        removed = drop_with_layout(registry, *finding.key)
        if any(overrides.get(function) == name for function, name in removed):
            raise UserError(f"--functions {finding.text}; {ADVICE.get(finding.verdict, 'fix it')}, or leave it out")
        logger.warning("kernel dropped, the reference is used: %s", finding.text)
        if others := ", ".join(f"{function}={name}" for function, name in removed[1:]):
            logger.warning("kernels dropped that read or pack weights for %s=%s: %s", *finding.key[:2], others)


def _findings(cases: Sequence[TrialCase], trials: Trials, request: TrialRequest) -> list[Finding]:
    """Findings about ``cases``, which run in a trial process, or in this process if their implementation exists only here.

    An implementation that the trial process lists but did not reach gets the finding "not tried". It is not run in this process,
    which it could crash or block.
    """
    outcome = try_in_process(request, LIMIT)
    if outcome.problem:
        logger.info("the process that tries kernels: %s", outcome.problem)
    findings, keys = outcome.findings, outcome.keys or set()
    run_cases(
        [case for case in cases if case.key not in keys],
        trials,
        lambda message: findings.append(message.finding) if message.has_ended else None,
        seconds=SECONDS,
    )
    # Findings "not tried" so far are about further cases, beyond the time budget.
    findings = [finding for finding in findings if finding.verdict != "not tried"]
    known = {finding.key for finding in findings}
    missing = {case.key: case for case in reversed(cases) if case.key not in known}
    return [*findings, *(case.finding("not tried", outcome.problem) for case in missing.values())]


def _failed(
    path: Path | None, keys: Sequence[Key], try_others: Callable[[Sequence[Key]], list[Finding]], *, anew: bool
) -> list[Finding]:
    """Findings about implementations that fail, from the cache file ``path`` or from new trials, which are added to the file. One process
    at a time runs trials. A finding that may differ at the next start is used only by ranks of this start.

    Args:
        keys: implementations to have findings about; those that the file lacks are tried.
        try_others: tries all implementations but those of its argument.
        anew: whether to ignore the file.
    """
    begin, nothing = time.time(), TrialRecord()
    known = nothing if anew else _read(path).lasting()
    if set(keys) <= set(known.tried):
        return known.failed
    logger.info("trying the kernels of this device and of plugins once")
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):  # reported when the file is written
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            on_wait = partial(logger.debug, "another process tries these kernels")
            stack.enter_context(locked(path.with_suffix(".lock"), LIMIT, on_wait))
            known = _read(path)
            if known.made < begin:  # else another rank of this start has just tried all of them
                known = nothing if anew else known.lasting()
        rest = set(keys) - set(known.tried)
        if not rest:
            return known.failed
        new = {finding.key: finding for finding in reversed(try_others(known.tried)) if finding.verdict not in PASSING}
        tried = [*known.tried, *(key for key in keys if key in rest)]
        record = TrialRecord(tried, [*known.failed, *reversed(new.values())], time.time())
        if path is not None:
            try:
                write_sealed(path, msgspec.json.encode(record))
            except OSError as error:
                logger.info("the results of the trials could not be saved: %s", error)
    return record.failed


def _read(path: Path | None) -> TrialRecord:
    """Read the cached record at ``path``; an empty record if the file is missing or damaged."""
    try:
        if path is not None:
            return msgspec.json.decode(read_sealed(path), type=TrialRecord)
    except FileNotFoundError:
        pass
    except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is ignored (%s); the kernels are tried again", path, error)
    return TrialRecord()


def try_in_process(request: TrialRequest, limit: float) -> TrialOutcome:
    """Run the cases of ``request`` in a trial process. Returns its results so far after ``limit`` seconds at the latest."""
    outcome, is_complete, running, begin = TrialOutcome(), False, None, 0.0
    deadline = time.monotonic() + limit
    try:
        with JsonChild("labinfer.launch.trial_process", request) as child:
            for line in child.lines(deadline):
                message = msgspec.json.decode(line, type=Message)
                if isinstance(message, CaseList):
                    outcome.keys, outcome.num_cases = set(message.keys), message.num_cases
                elif isinstance(message, Complete):
                    is_complete = True
                elif message.has_ended:
                    outcome.findings.append(message.finding)
                    running = None
                else:
                    running, begin = message.finding, time.monotonic()
            if is_complete:
                outcome.problem = ""
                return outcome
            status, said = child.exit_code(deadline), child.last_error()
    except OSError as error:
        outcome.problem = str(error)
        return outcome
    if status is not None:
        outcome.problem = f"it ended early with exit code {status}: {said}".removesuffix(": ")
        return outcome
    outcome.problem = f"no time in the {limit:g} s of the trials"
    if running is not None and (silence := time.monotonic() - begin) > FIRST_SECONDS:
        detail = f"no result within {silence:.0f} s"
        outcome.findings.append(msgspec.structs.replace(running, verdict="hangs", detail=detail))
    return outcome


def _hardware(device: torch.device) -> str:
    """Type and product name of an accelerator; empty for CPUs, which providers name in their fingerprints."""
    return "" if device.type == "cpu" else f"{device.type} {hardware_name(device)}"
