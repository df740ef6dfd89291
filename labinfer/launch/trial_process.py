"""Process that tries implementations of functions, so that one that crashes or hangs ends only a fork of it.

The process imports everything, but touches no device. Its fork tries one case after another and tells it about each. If the fork
ends or is silent for too long, the implementation it was trying is at fault, and another fork goes on behind it.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch

from labinfer.base.plugins import PLUGINS, PluginSource, describe_error
from labinfer.base.registry import REGISTRY
from labinfer.base.standard_error import write_error
from labinfer.functions.calls import CallSetting, FunctionCall
from labinfer.functions.capture_trial import CaptureCase
from labinfer.functions.registry import WeightChoice
from labinfer.functions.trial import Finding, TrialCase, Trials, Verdict, is_tried, make_cases
from labinfer.launch.providers import make_providers, make_registry, reference_registry

HANG_SECONDS = 5.0
"""Silence after which an implementation counts as hanging."""
READY_SECONDS = 60.0
"""Maximum time in which the providers get ready."""
LEAST_LIMIT = 30
"""Seconds beyond the time budget after which a fork ends by itself, should the process be gone."""


class SettingSpec(msgspec.Struct, frozen=True, array_like=True):
    """A ``CallSetting`` without its device; dtypes by name."""

    dtype: str
    kv_dtype: str
    block_size: int
    tiled_cache: bool

    @classmethod
    def from_setting(cls, setting: CallSetting) -> SettingSpec:
        """Description of ``setting``."""
        names = (str(dtype).removeprefix("torch.") for dtype in (setting.dtype, setting.kv_dtype))
        return cls(*names, setting.block_size, setting.tiled_cache)

    def on(self, device: torch.device) -> CallSetting:
        """The setting on ``device``."""
        return CallSetting(
            device=device,
            dtype=getattr(torch, self.dtype),
            kv_dtype=getattr(torch, self.kv_dtype),
            block_size=self.block_size,
            tiled_cache=self.tiled_cache,
        )


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
        """The call."""
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
    tries_all: bool = False
    """Whether to try all implementations, also those of the CPU and the reference, in all cases, and to time them."""
    seconds: float
    """Time budget in seconds for the cases of one fork; see ``run_cases``."""

    def cases(self, device: torch.device) -> Iterator[TrialCase | CaptureCase]:
        """All cases, with the functions that this process's providers have for ``device``."""
        providers = make_providers()
        for provider in providers:
            provider.prepare(device)
        registry = make_registry(providers, self.group_size, self.weights)
        settings = [spec.on(device) for spec in self.settings]
        chosen = (lambda item, device: True) if self.tries_all else is_tried
        yield from make_cases(registry, settings, [spec.make() for spec in self.calls], chosen)
        if self.tries_all:
            for provider in providers:
                if provider.capture() is not None:
                    for setting in settings:
                        functions = registry.select(device, setting.dtype)
                        setting = replace(setting, tiled_cache=functions.tiled_cache)
                        name = type(provider).__name__
                        yield CaptureCase(
                            name=name, make_capture=provider.capture, functions=functions, setting=setting
                        )


class TrialMessage(msgspec.Struct, frozen=True, array_like=True):
    """TrialMessage of a fork about one case."""

    index: int
    finding: Finding
    """Finding of the case; before its end, the finding that holds if the fork ends or hangs."""
    has_ended: bool


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
        seconds: time budget; beyond, only the first case of each implementation is run.
        begin: index of the first case to run.
        failed: ``_key`` of implementations that are not run again.
        stops_at_failure: whether the further cases of an implementation that failed are not run.
    """
    deadline, failed, tried = time.monotonic() + seconds, set(failed), set()
    for index, case in enumerate(cases):
        started = case.finding("hangs")
        is_late = time.monotonic() > deadline and _key(started) in tried
        if index < begin or _key(started) in failed or is_late:
            continue
        tried.add(_key(started))
        on_message(TrialMessage(index, started, False))
        finding = case.run() if isinstance(case, CaptureCase) else trials.run(case)
        on_message(TrialMessage(index, finding, True))
        if finding.verdict != "works" and stops_at_failure:
            failed.add(_key(finding))


def _key(finding: Finding) -> tuple[str, str, str, str]:
    return (*finding.key, finding.dtype)


def follow_forks(request: TrialRequest, on_finding: Callable[[Finding], None]) -> None:
    """Run the cases of ``request`` in forks, and report each finding."""
    begin, failed = 0, []
    while True:
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(source)
            _run_fork(request, begin, failed, sink)
        os.close(sink)
        running, silence = _follow(source, on_finding)
        os.close(source)
        if silence:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if running is None:
            if silence or status:
                how = f"is silent for {silence:g} s" if silence else _how_ended(status)
                write_error(f"the process that prepares the functions of {request.device} {how}\n")
            return
        verdict: Verdict = "hangs" if silence else "crashes"
        detail = f"no result within {silence:g} s" if silence else _how_ended(status)
        on_finding(msgspec.structs.replace(running.finding, verdict=verdict, detail=detail))
        begin = running.index + 1
        failed.append(_key(running.finding))


def _run_fork(request: TrialRequest, begin: int, failed: list, sink: int) -> None:
    """Run cases in this fork, which ends."""
    status = 1
    try:
        signal.alarm(int(request.seconds) + int(READY_SECONDS) + LEAST_LIMIT)
        device = torch.device(request.device)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        trials = Trials(reference_registry(request.group_size, request.weights), is_timed=request.tries_all)
        run_cases(
            request.cases(device),
            trials,
            lambda message: os.write(sink, msgspec.json.encode(message) + b"\n"),
            seconds=request.seconds,
            begin=begin,
            failed=failed,
            stops_at_failure=not request.tries_all,
        )
        status = 0
    except Exception as error:  # noqa: BLE001 - a provider may raise anything; the process that started this one tells
        write_error(f"{describe_error(error)}\n")
    finally:
        os._exit(status)  # without destructors, which may crash in a vendor's library


def _follow(source: int, on_finding: Callable[[Finding], None]) -> tuple[TrialMessage | None, float]:
    """Read the messages of a fork. Returns the case that it has not ended (None if it has ended all), and the seconds of silence
    after which it was given up (0 if it ended)."""
    running, rest, limit = None, b"", READY_SECONDS
    while True:
        if not select.select([source], [], [], limit)[0]:
            return running, limit
        data = os.read(source, 1 << 16)
        if not data:
            return running, 0.0
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line, type=TrialMessage)
            running, limit = None if message.has_ended else message, HANG_SECONDS
            if message.has_ended:
                on_finding(message.finding)


def _how_ended(status: int) -> str:
    """End of a process in words: its signal or exit code."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was ended by {signal.Signals(-status).name}"


def main() -> None:
    """Read a ``TrialRequest`` from standard input, and write one finding per line to standard output."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    output = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    torch.set_num_threads(1)
    PLUGINS.load(request.plugins)
    REGISTRY.parts("function_provider")  # imported once, for all forks
    follow_forks(request, lambda finding: os.write(output, msgspec.json.encode(finding) + b"\n"))


if __name__ == "__main__":
    main()
