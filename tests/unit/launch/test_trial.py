"""Trials at a start: which implementations are dropped, tried in this process and cached, and the processes that try."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.functions.calls import CallSetting
from labinfer.functions.reference.sampling import argmax
from labinfer.functions.registry import FunctionRegistry, Implementation
from labinfer.functions.trial import Finding, Trials, make_cases
from labinfer.launch import trial, trial_process
from labinfer.launch.json_child import JsonChild
from labinfer.launch.providers import reference_registry
from labinfer.launch.trial import TrialOutcome, drop_failing
from labinfer.launch.trial_process import CaseList, Complete, TrialMessage, TrialRequest

CPU = torch.device("cpu")
SETTING = CallSetting(device=CPU, dtype=torch.float32, kv_dtype=torch.float32, block_size=16)
OWN, OTHER = ("argmax", "own", "none"), ("argmax", "other", "none")
REQUEST = TrialRequest(device="cpu", settings=[], calls=[], group_size=64, seconds=1.0)


def finding(verdict: str, key: tuple[str, str, str] = OWN) -> Finding:
    function, name, quantization = key
    named = {"function": function, "name": name, "quantization": quantization, "dtype": "float32"}
    return Finding(**named, kv_dtype="float32", rows=3, verdict=verdict, detail="as the test says")


class Start:
    """Starts with a plugin's two implementations of ``argmax``, and a trial process with given results.

    Args:
        cache: folder of cached results.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path):
        self._monkeypatch, self._cache = monkeypatch, cache
        self.num_calls = 0
        self.known: list | None = None
        """Implementations that the last trial process did not have to try; None if there was no process."""

    def argmax(self, logits_BV: torch.Tensor):
        self.num_calls += 1
        return argmax(logits_BV)

    def names(self, outcome: TrialOutcome, **options) -> set[str]:
        """Names of the implementations that are left after a start."""
        registry = reference_registry()
        registry.plugin = "ideas"
        for name in ("own", "other"):
            registry.add("argmax", Implementation(name=name, call=self.argmax))
        self.known, self.num_calls = None, 0

        def try_in_process(request: TrialRequest, limit: float) -> TrialOutcome:
            self.known = request.known
            return outcome

        self._monkeypatch.setattr(trial, "try_in_process", try_in_process)
        named = {"providers": [], "group_size": 64, "weights": "auto", "overrides": {}, "cache": self._cache}
        drop_failing(registry, SETTING, [], **{**named, **options})
        return {item.name for item in registry.all_candidates("argmax")} - {"reference"}


@pytest.fixture
def start(monkeypatch, tmp_path) -> Start:
    return Start(monkeypatch, tmp_path / "cache")


def test_kernel_that_the_process_did_not_reach_is_not_run_here(start, caplog):
    cut_off = TrialOutcome(findings=[finding("works", OTHER)], keys={OWN, OTHER}, problem="no time")
    assert start.names(cut_off) == {"other"}
    assert start.num_calls == 0 and "argmax=own not tried: no time" in caplog.text
    works = TrialOutcome(findings=[finding("works")], keys={OWN}, problem="")
    assert start.names(works) == {"own", "other"} and start.known == [OTHER]
    assert start.names(TrialOutcome()) == {"own", "other"} and start.known is None


def test_kernel_that_the_process_lacks_is_tried_here(start):
    """Functions of the calling program."""
    assert start.names(TrialOutcome(findings=[finding("works")], keys={OWN}, problem="")) == {"own", "other"}
    assert start.num_calls > 0


@pytest.mark.parametrize(
    ("verdict", "is_cached"),
    [("wrong", True), ("raises", True), ("crashes", True), ("hangs", True), ("lacks memory", False)],
)
def test_only_lasting_results_are_cached(start, verdict, is_cached):
    both = TrialOutcome(findings=[finding("works", OTHER), finding(verdict)], keys={OWN, OTHER}, problem="")
    assert start.names(both) == {"other"}
    works = TrialOutcome(findings=[finding("works")], keys={OWN}, problem="")
    assert start.names(works) == ({"other"} if is_cached else {"own", "other"})
    assert start.known == (None if is_cached else [OTHER])


@pytest.mark.parametrize("anew", [False, True])
def test_ranks_of_one_start_share_a_hang(start, monkeypatch, tmp_path, anew):
    """Else each rank of a node would try the same kernel, one after the other."""
    outcome = TrialOutcome(findings=[finding("works", OTHER), finding("lacks memory")], keys={OWN, OTHER}, problem="")

    @contextmanager
    def wait_for_other_rank(*given):
        with monkeypatch.context() as patch:
            patch.setattr(trial, "locked", lambda *given: nullcontext())
            assert start.names(outcome, anew=anew) == {"other"} and start.known == []
        start.known = None
        monkeypatch.setattr(trial, "try_in_process", lambda *given: pytest.fail("a second process tries"))
        yield

    monkeypatch.setattr(trial, "locked", wait_for_other_rank)
    assert start.names(outcome, anew=anew) == {"other"} and start.known is None


def test_results_are_made_anew_where_that_is_said(start):
    for verdict, left in (("wrong", set()), ("works", {"own", "other"})):
        found = [finding(verdict), finding(verdict, OTHER)]
        assert start.names(TrialOutcome(findings=found, keys={OWN, OTHER}, problem=""), anew=True) == left


@pytest.mark.parametrize(
    ("verdict", "advice"),
    [
        ("wrong", "fix it, or"),
        ("hangs", "--autotune again gives it another try, or"),
        ("lacks memory", "start again to try it, or"),
    ],
)
def test_failing_kernel_that_is_named_is_refused(start, verdict, advice):
    outcome = TrialOutcome(findings=[finding(verdict), finding("works", OTHER)], keys={OWN, OTHER}, problem="")
    with pytest.raises(UserError, match=f"--functions argmax=own .*; {advice} leave it out"):
        start.names(outcome, overrides={"argmax": "own"})


def test_folder_that_cannot_be_made_ends_no_start(start, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    outcome = TrialOutcome(findings=[finding("wrong"), finding("works", OTHER)], keys={OWN, OTHER}, problem="")
    caplog.set_level("INFO")
    assert start.names(outcome, cache=tmp_path / "file" / "cache") == {"other"}
    assert "the results of the trials could not be saved" in caplog.text


def test_plugin_for_another_device_starts_no_process(monkeypatch):
    registry = FunctionRegistry()
    registry.plugin = "ideas"
    registry.add("argmax", Implementation(name="own", call=argmax, devices=("card",)))
    monkeypatch.setattr(trial, "try_in_process", lambda *given: pytest.fail("a process was started"))
    drop_failing(registry, SETTING, [], providers=[], group_size=64, weights="auto", overrides={}, cache=None)


def test_reference_that_fails_is_no_fault_of_the_kernel():
    registry, broken = reference_registry(), FunctionRegistry()
    registry.plugin = "ideas"
    registry.add("argmax", Implementation(name="own", call=argmax))
    broken.add("argmax", Implementation(name="reference", call=lambda logits_BV: logits_BV.no_such_call()))
    case = next(
        iter(make_cases(registry, [SETTING], [call for call in trial.protocol_calls() if call.target == "argmax"]))
    )
    found = Trials(broken).run(case)
    assert found.verdict == "unknown" and found.detail.startswith("the reference has no such call: AttributeError")


CHILD = """
import os, sys, time

sys.stdin.buffer.read()
os.write(1, bytes.fromhex({output!r}))
{end}
"""


def try_with(monkeypatch, folder: Path, output: list, end: str, limit: float = 60.0) -> TrialOutcome:
    """Outcome of a trial process that writes the messages ``output`` and runs ``end``."""
    lines = b"".join(msgspec.json.encode(message) + b"\n" for message in output)
    (folder / "child_of_test.py").write_text(CHILD.format(output=lines.hex(), end=end))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(trial, "JsonChild", lambda module, request: JsonChild("child_of_test", request))
    return trial.try_in_process(REQUEST, limit)


LISTED = CaseList([OWN, OTHER], 9)
ENDED, STARTED = TrialMessage(0, finding("works"), True), TrialMessage(1, finding("hangs", OTHER), False)


def test_outcome_of_a_complete_process(monkeypatch, tmp_path):
    outcome = try_with(monkeypatch, tmp_path, [LISTED, ENDED, Complete()], "")
    assert outcome == TrialOutcome(findings=[finding("works")], keys={OWN, OTHER}, num_cases=9, problem="")


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("", "it ended early with exit code 0"),
        ("sys.exit('no such card')", "it ended early with exit code 1: no such card"),
        ("os.kill(os.getpid(), 11)", "it ended early with exit code -11"),
    ],
)
def test_process_without_a_last_message_was_cut_off(monkeypatch, tmp_path, end, problem):
    outcome = try_with(monkeypatch, tmp_path, [LISTED, ENDED], end)
    assert (outcome.problem, len(outcome.findings), outcome.num_cases) == (problem, 1, 9)


def test_kernel_that_runs_at_the_deadline_hangs(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "FIRST_SECONDS", 0.1)
    outcome = try_with(monkeypatch, tmp_path, [LISTED, ENDED, STARTED], "time.sleep(1000)", 3.0)
    assert [(each.key, each.verdict) for each in outcome.findings] == [(OWN, "works"), (OTHER, "hangs")]
    assert outcome.problem == "no time in the 3 s of the trials"


def test_forks_end_with_their_process(tmp_path, monkeypatch):
    (tmp_path / "forking_child.py").write_text(
        "import os, time\nif pid := os.fork():\n    os.write(1, b'%d\\n' % pid)\ntime.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with JsonChild("forking_child", REQUEST) as child:
        pid = int(next(child.lines(time.monotonic() + 60)))
        assert list(child.lines(time.monotonic() + 0.1)) == [] and child.exit_code(time.monotonic()) is None
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("is_first", "limit"), [(True, 0.2), (False, 0.1)])
def test_first_case_may_take_longer(monkeypatch, is_first, limit):
    """It may be compiled."""
    monkeypatch.setattr(trial_process, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(trial_process, "HANG_SECONDS", 0.1)
    source, sink = os.pipe()
    try:
        os.write(sink, msgspec.json.encode(STARTED) + b"\n")
        known = set() if is_first else {(*OTHER, "float32")}
        assert trial_process._follow(source, lambda message: None, known) == (STARTED, limit)
    finally:
        os.close(source)
        os.close(sink)


def test_cases_beyond_the_time_budget_are_named():
    registry = reference_registry()
    registry.plugin = "ideas"
    registry.add("argmax", Implementation(name="own", call=argmax))
    calls = [call for call in trial.protocol_calls() if call.target == "argmax"]
    messages = []
    cases = list(make_cases(registry, [SETTING], calls))
    trial_process.run_cases(cases, Trials(reference_registry()), messages.append, seconds=-1.0)
    verdicts = [message.finding.verdict for message in messages if message.has_ended]
    assert verdicts == ["works", *["not tried"] * (len(cases) - 1)] and len(cases) > 1
