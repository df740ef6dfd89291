"""Process that tries implementations of functions, so that one that crashes or hangs ends only a fork of it.

The process imports everything, but touches no device. A fork of it tries one case after another and reports each. If the fork crashes
or is silent for too long, the implementation that it was trying is at fault, and a new fork continues with the next case.
"""

from __future__ import annotations

import importlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from labinfer.base.plugins import PLUGINS, PluginSource, describe_error
from labinfer.base.registry import REGISTRY
from labinfer.base.standard_error import write_error
from labinfer.comm.group.signals import die_with_parent
from labinfer.functions.calls import CallSetting, FunctionCall
from labinfer.functions.capture_trial import CaptureCase
from labinfer.functions.registry import WeightChoice
from labinfer.functions.trial import PASSING, Finding, TrialCase, Trials, Verdict, dtype_name, is_tried, make_cases
from labinfer.launch.providers import make_providers, make_registry, reference_registry

FIRST_SECONDS = 6.0
"""Seconds without a result after which an implementation counts as hanging in its first case, in which it may be compiled as well."""
HANG_SECONDS = 5.0
"""Seconds without a result after which an implementation counts as hanging in a later case."""
READY_SECONDS = 60.0
"""Maximum seconds until a fork lists its cases, which includes the preparation of the providers."""

Key = tuple[str, str, str]
"""Function, implementation and quantization."""


class SettingSpec(msgspec.Struct, frozen=True, array_like=True):
    """A ``CallSetting`` without its device."""

    dtypes: dict[str, str]
    """Name of the dtype, by field of ``CallSetting``."""
    others: dict[str, Any]
    """Value of each other field of ``CallSetting``, without ``device``."""

    @classmethod
    def from_setting(cls, setting: CallSetting) -> SettingSpec:
        """Convert ``setting``, all but its device."""
        fields = {name: value for name, value in vars(setting).items() if name != "device"}
        dtypes = {name: dtype_name(value) for name, value in fields.items() if isinstance(value, torch.dtype)}
        return cls(dtypes, {name: value for name, value in fields.items() if name not in dtypes})

    def on(self, device: torch.device) -> CallSetting:
        """Convert back to a ``CallSetting``, on ``device``."""
        dtypes = {name: getattr(torch, dtype) for name, dtype in self.dtypes.items()}
        return CallSetting(device=device, **dtypes, **self.others)


class CallSpec(msgspec.Struct, frozen=True, array_like=True):
    """A ``FunctionCall``: module and name of its class, which is a dataclass of plain values, and its fields."""

    module: str
    name: str
    fields: dict[str, Any]

    @classmethod
    def from_call(cls, call: FunctionCall) -> CallSpec:
        """Description of ``call``."""
        return cls(type(call).__module__, type(call).__qualname__, msgspec.to_builtins(vars(call)))

    def make(self) -> FunctionCall:
        """Make the described ``FunctionCall``."""
        return msgspec.convert(self.fields, getattr(importlib.import_module(self.module), self.name))


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the trial process: device, settings and calls to try."""

    device: str
    settings: list[SettingSpec]
    calls: list[CallSpec]
    group_size: int
    """Group size of int4: inputs that share a scale."""
    weights: WeightChoice = "auto"
    plugins: list[PluginSource] = []
    known: list[Key] = []
    """Implementations that are not tried, as their results are cached."""
    tries_all: bool = False
    """Whether to try all implementations, also those of the CPU and the reference, in all cases, and to time them."""
    seconds: float
    """Time budget in seconds for the cases of one fork; see ``run_cases``."""

    def cases(self, device: torch.device) -> Iterator[TrialCase | CaptureCase]:
        """All trial cases of this request, with the functions that this process's providers have for ``device``."""
        providers = make_providers()
        for provider in providers:
            provider.prepare(device)
        registry = make_registry(providers, self.group_size, self.weights)
        settings = [spec.on(device) for spec in self.settings]
        chosen = (lambda item, device: True) if self.tries_all else is_tried
        calls, known = [spec.make() for spec in self.calls], set(self.known)
        cases = make_cases(registry, settings, calls, chosen)
        yield from (case for case in cases if case.key not in known)
        if self.tries_all:
            for provider in providers:
                if provider.capture() is not None:
                    name = type(provider).__name__
                    for setting in settings:
                        select = partial(registry.select, device, setting.dtype)
                        yield CaptureCase(name=name, make_capture=provider.capture, select=select, setting=setting)


class CaseList(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First message of a fork: the implementations and number of cases that it can try."""

    keys: list[Key]
    """Implementations that have cases."""
    num_cases: int


class Complete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last message of a fork that has run all its cases."""


class TrialMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Message of a fork about the start or the end of one ``TrialCase``."""

    index: int
    finding: Finding
    """Finding of the case; before its end, the finding that holds if the fork ends or hangs."""
    has_ended: bool


Message = CaseList | TrialMessage | Complete


def run_cases(
    cases: Iterable[TrialCase | CaptureCase],
    trials: Trials,
    on_message: Callable[[TrialMessage], None],
    *,
    seconds: float,
    begin: int = 0,
    failed: Collection[tuple[str, str, str, str]] = (),
    stops_at_failure: bool = True,
) -> None:
    """Run cases, and report before and after each.

    Args:
        seconds: time budget; beyond it, only the first case of each implementation and dtype is run. Other cases are "not tried".
        begin: index of the first case to run.
        failed: ``_key`` of implementations that are not run again.
        stops_at_failure: whether to skip further cases of an implementation after its first failure.
    """
    deadline, failed, tried = time.monotonic() + seconds, set(failed), set()
    for index, case in enumerate(cases):
        started = case.finding("hangs")
        if index < begin or _key(started) in failed:
            continue
        if time.monotonic() > deadline and _key(started) in tried:
            late = case.finding("not tried", f"beyond the {seconds:g} s of the trials")
            on_message(TrialMessage(index, late, True))
            continue
        tried.add(_key(started))
        on_message(TrialMessage(index, started, False))
        finding = case.run() if isinstance(case, CaptureCase) else trials.run(case)
        on_message(TrialMessage(index, finding, True))
        if finding.verdict not in PASSING and stops_at_failure:
            failed.add(_key(finding))


def _key(finding: Finding) -> tuple[str, str, str, str]:
    return (*finding.key, finding.dtype)


def follow_forks(request: TrialRequest, on_message: Callable[[Message], None]) -> None:
    """Run the cases of ``request`` in forks, and pass on their messages. ``Complete`` is missing if a fork fails outside of a case."""
    begin, failed, started = 0, [], set()
    while True:
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(source)
            _run_fork(request, begin, failed, sink)
        os.close(sink)
        silence = math.inf  # kills the fork if this process cannot pass on its messages
        try:
            running, silence = _follow(source, on_message, started)
        finally:
            os.close(source)
            if silence:
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if running is None:
            if silence or status not in (0, 1):  # a fork that raises has printed the error
                how = f"is silent for {silence:g} s" if silence else _how_ended(status)
                write_error(f"the process that prepares the functions of {request.device} {how}\n")
            return
        verdict: Verdict = "hangs" if silence else "crashes"
        if status == -signal.SIGKILL and not silence:
            verdict = "lacks memory"  # nothing but the kernel's out-of-memory killer sends it
        detail = f"no result within {silence:g} s" if silence else _how_ended(status)
        finding = msgspec.structs.replace(running.finding, verdict=verdict, detail=detail)
        on_message(TrialMessage(running.index, finding, True))
        begin = running.index + 1
        failed.append(_key(running.finding))


def _run_fork(request: TrialRequest, begin: int, failed: list, sink: int) -> None:
    """Run the cases of ``request`` from index ``begin`` on, write messages to the descriptor ``sink``, and exit this forked process."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        device = torch.device(request.device)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        trials = Trials(reference_registry(request.group_size, request.weights), is_timed=request.tries_all)
        cases = list(request.cases(device))
        tell = partial(_tell, sink)
        tell(CaseList(list(dict.fromkeys(case.key for case in cases)), len(cases)))
        run_cases(
            cases,
            trials,
            tell,
            seconds=request.seconds,
            begin=begin,
            failed=failed,
            stops_at_failure=not request.tries_all,
        )
        tell(Complete())
        status = 0
    except Exception as error:  # noqa: BLE001 - a provider may raise anything; the process that started this one tells
        write_error(f"{describe_error(error)}\n")
    finally:
        os._exit(status)  # without destructors, which may crash in a vendor's library


def _tell(sink: int, message: Message) -> None:
    os.write(sink, msgspec.json.encode(message) + b"\n")


def _follow(
    source: int, on_message: Callable[[Message], None], started: set[tuple[str, str, str, str]]
) -> tuple[TrialMessage | None, float]:
    """Pass on the messages of a fork, until it ends or is silent for too long.

    Args:
        started: ``_key`` of implementations that have had a case; those of this fork are added.

    Returns:
        The start of the case that has not ended, None without one; and the seconds of silence, 0 if the fork ended.
    """
    running, rest, limit = None, b"", READY_SECONDS
    while True:
        if not select.select([source], [], [], limit)[0]:
            return running, limit
        data = os.read(source, 1 << 16)
        if not data:
            return running, 0.0
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line, type=Message)
            running, limit = None, HANG_SECONDS
            if isinstance(message, TrialMessage) and not message.has_ended:
                running, key = message, _key(message.finding)
                limit = HANG_SECONDS if key in started else FIRST_SECONDS
                started.add(key)
            on_message(message)


def _how_ended(status: int) -> str:
    """End of a process in words: its signal or exit code."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was ended by {signal.Signals(-status).name}"


def main() -> None:
    """Read a ``TrialRequest`` from standard input, and write one message (``CaseList``, ``TrialMessage`` or ``Complete``) per line to standard output."""
    die_with_parent(signal.SIGKILL)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    output = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    torch.set_num_threads(1)
    PLUGINS.load(request.plugins)
    REGISTRY.parts("function_provider")  # imported once, for all forks
    follow_forks(request, partial(_tell, output))


if __name__ == "__main__":
    main()
