"""The recorder's slices, what they add up to, and the trace file."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.base.plan import BatchEntry, BatchPlan, EndRun
from labinfer.base.rank_stats import Slices, WorkerStats
from labinfer.observe.output_file import OutputFile
from labinfer.observe.recorder import Recorder
from labinfer.observe.report import RunReport
from labinfer.observe.trace import own_times, read_slices, write_trace
from labinfer.worker.spmd import follow


def plan_of(step_id: int, *num_tokens: int) -> BatchPlan:
    entries = [
        BatchEntry(
            seq_id=n,
            num_tokens=count,
            begin=0,
            position=0,
            first_block=0,
            new_blocks=[],
            num_samples=1,
            is_decode=count == 1,
        )
        for n, count in enumerate(num_tokens)
    ]
    return BatchPlan(step_id=step_id, starts=[], finished=[], moves=[], entries=entries)


def recorded(*slices: tuple, clock: int = 0, dropped: int = 0) -> Slices:
    """From (name, begin, end, step_id, num_tokens), all of them decodes."""
    names = list(dict.fromkeys(name for name, *_ in slices))
    numbers = array("q", [n for name, *rest in slices for n in (names.index(name), *rest, rest[-1])])
    return Slices(names, numbers.tobytes(), clock, dropped)


def stats_of(rank: int, slices: Slices | None) -> WorkerStats:
    return WorkerStats(
        rank=rank,
        stage=rank,
        tp_rank=0,
        num_steps=1,
        busy_time=1.0,
        peak_memory=0,
        private_memory=0,
        weight_bytes_read=0,
        num_threads=1,
        cpus="0",
        slices=slices,
    )


def test_slices_are_recorded_with_their_step_and_nest():
    recorder = Recorder(10)
    with recorder.slice("schedule"):
        pass
    with recorder.slice("step", plan_of(7, 3, 1)):
        with recorder.slice("run", plan_of(7, 3, 1)):
            pass
    taken = recorder.take()
    schedule, step, run = read_slices(taken)
    assert [(s.name, s.step_id, s.num_tokens, s.num_decodes) for s in (schedule, step, run)] == [
        ("schedule", -1, 0, 0),
        ("step", 7, 4, 1),
        ("run", 7, 4, 1),
    ]
    assert schedule.begin <= schedule.end <= step.begin <= run.begin <= run.end <= step.end
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken), type=Slices) == taken


def test_slice_that_ends_in_an_error_is_recorded_too():
    recorder = Recorder(1)
    with pytest.raises(ValueError, match="mine"), recorder.slice("run"):
        raise ValueError("mine")
    assert [s.name for s in read_slices(recorder.take())] == ["run"]


def test_what_there_is_no_room_for_is_counted():
    recorder = Recorder(2)
    for name in "abcd":
        with recorder.slice(name):
            pass
    taken = recorder.take()
    assert [s.name for s in read_slices(taken)] == ["a", "b"] and taken.num_dropped == 2
    with recorder.slice("e"):
        pass
    taken = recorder.take()
    assert [s.name for s in read_slices(taken)] == ["e"] and taken.num_dropped == 0


def test_without_room_nothing_is_recorded():
    recorder = Recorder()
    with recorder.slice("run", plan_of(0, 1)):
        pass
    assert recorder.take() is None


def test_what_was_open_when_it_was_turned_off_does_not_come_when_it_is_on_again():
    recorder = Recorder(10)
    with recorder.slice("a"):
        recorder.take()
        recorder.add("left", 1, 2, None)  # by another thread, between these two lines of whoever turns it off
        recorder.capacity = 0
    assert recorder.take() is None
    recorder.capacity = 10
    with recorder.slice("b"):
        pass
    taken = recorder.take()
    assert [s.name for s in read_slices(taken)] == ["b"] and taken.num_dropped == 0


def test_another_thread_takes_each_slice_once_and_whole():
    """With a capacity that is turned off and on meanwhile, nothing is lost but what is counted, or came while it was off."""
    recorder, taken, count = Recorder(50), [], 20_000

    def record() -> None:
        for number in range(count):
            recorder.add("ab"[number % 2], number, number + 1, None)

    thread = threading.Thread(target=record)
    thread.start()
    while thread.is_alive():
        taken.append(recorder.take())
    taken.append(recorder.take())
    slices = [one for some in taken for one in zip(*[iter(array("q", some.numbers))] * 6, strict=True)]
    assert [begin for _, begin, *_ in slices] == sorted({begin for _, begin, *_ in slices})
    for name, begin, end, *of_step in slices:
        assert (name, end, of_step) == (begin % 2, begin + 1, [-1, 0, 0])
    assert len(slices) + sum(some.num_dropped for some in taken) == count


def test_clock_is_right_though_a_thread_is_interrupted_between_its_two_readings(monkeypatch):
    """The first of three times it takes 5 ms from one clock to the other."""
    times = iter([100, 105, 110])
    recorder = Recorder(1)
    monkeypatch.setattr(time, "time_ns", lambda: next(times) * 1_000_000)
    monkeypatch.setattr(time, "perf_counter_ns", iter([105_000_000, 105_000_000, 110_000_000]).__next__)
    assert recorder.take().clock == 0


def test_own_times_leave_out_what_lies_within():
    slices = recorded(
        ("run", 20, 60, 0, 1), ("step", 10, 100, 0, 1), ("engine", 0, 110, -1, 0), ("engine", 110, 120, -1, 0)
    )
    assert own_times(read_slices(slices)) == {"engine": 30, "step": 50, "run": 40}


def test_report_says_how_much_of_rank_0s_steps_was_outside_the_model():
    slices = recorded(("engine", 0, 100, -1, 0), ("run", 10, 70, 0, 1), ("sample", 70, 80, 0, 1), dropped=3)
    report = RunReport(workers=[stats_of(0, slices), stats_of(1, recorded(("run", 0, 9, 0, 1)))])
    assert report.time_shares() == {"run": 0.6, "engine": 0.3, "sample": 0.1}
    assert (
        "overhead on rank 0     30.0 % of its time outside the model, without waits: engine 30.0 %" in report.format()
    )
    assert "3 slices" in report.format()
    waiting = RunReport(workers=[stats_of(0, recorded(("wait for tokens", 0, 50, 0, 0), ("update", 50, 60, 0, 0)))])
    assert f"{100 * 10 / 60:.1f} % of its time outside the model" in waiting.format()
    assert report.as_dict()["time_shares"] == {"run": 0.6, "engine": 0.3, "sample": 0.1}


@pytest.mark.parametrize("workers", [[], [stats_of(0, None)], [stats_of(0, recorded())]], ids=["none", "off", "empty"])
def test_report_without_slices_says_nothing_of_them(workers):
    report = RunReport(workers=workers)
    assert report.time_shares() == {}
    assert "outside" not in report.format() and "trace" not in report.format()


def test_wait_for_a_plan_is_of_the_model_that_the_plan_is_for():
    recorders = [Recorder(10), Recorder(10)]
    follow(FakeChannel([plan(0), plan(1), plan(1), EndRun([], 1), EndRun([], 0)]), [follower(one) for one in recorders])
    names = [[one.name for one in read_slices(recorder.take())] for recorder in recorders]
    assert names == [["wait for a plan"] * 2, ["wait for a plan"] * 3]


def test_wait_that_began_before_anybody_watched_is_not_recorded():
    """Of a server that had no requests for an hour."""
    recorder = Recorder()

    def watch() -> None:
        recorder.capacity = 10

    follow(FakeChannel([plan(0), plan(0), EndRun([], 0)], watch), [follower(recorder)])
    assert len(read_slices(recorder.take())) == 2


class FakeChannel:
    """Hands these out, and has something done during the first wait."""

    def __init__(self, commands: list, meanwhile: Callable[[], None] = lambda: None):
        self._commands, self._meanwhile = commands, meanwhile

    def receive(self) -> BatchPlan | EndRun:
        self._meanwhile()
        return self._commands.pop(0)

    def reply(self, stats: None) -> None:
        pass


def plan(model: int) -> BatchPlan:
    return BatchPlan(step_id=0, starts=[], finished=[], moves=[], entries=[], model=model)


def follower(recorder: Recorder) -> tuple:
    runner = SimpleNamespace(forget=lambda ids: None)
    worker = SimpleNamespace(
        launch=lambda plan: None, progress=lambda: None, stop=lambda: None, runner=runner, num_steps=0, waits=Counter()
    )
    return worker, SimpleNamespace(take=lambda: None), recorder


def test_trace_has_a_track_for_each_rank_on_one_clock(tmp_path):
    """Ranks whose own clocks began at different times; the file's former content is gone."""
    path = tmp_path / "trace.json"
    path.write_text("what was there")
    workers = [
        stats_of(0, recorded(("step", 5_000, 9_000, 0, 4), ("engine", 4_000, 9_500, -1, 0), clock=1_000_000)),
        stats_of(1, recorded(("step", 1_006_500, 1_008_000, 0, 4), clock=0)),
        stats_of(2, recorded()),
    ]
    write_trace(OutputFile(str(path), "--trace"), workers)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (stage {rank}, tp 0)" for rank in range(3)}
    assert {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} == {
        (e["pid"], e["tid"]) for e in events
    }
    found = [(e["pid"], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert found == [
        (0, "engine", 0.0, 5.5, {}),
        (0, "step", 1.0, 4.0, {"step": 0, "tokens": 4, "decodes": 4}),
        (1, "step", 2.5, 1.5, {"step": 0, "tokens": 4, "decodes": 4}),
    ]


def test_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    from labinfer import LLM

    with pytest.raises(UserError, match="cannot write trace"):
        LLM(trace=str(tmp_path / "nowhere" / "trace.json"))


def test_each_run_of_an_llm_writes_its_own_trace(tmp_path):
    from labinfer import LLM, SamplingParams

    path = tmp_path / "trace.json"
    with LLM(trace=str(path), num_kv_blocks=64, threads=1) as llm:
        for max_tokens in (9, 4):
            llm.generate([5, 6, 7], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
            events = json.loads(path.read_text())["traceEvents"]
            assert [e["name"] for e in events].count("run") == max_tokens
            assert {"schedule", "update", "detokenise"} <= {e["name"] for e in events}
