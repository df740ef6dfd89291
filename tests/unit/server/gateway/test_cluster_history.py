"""Figures over time, who is told what, and when the ranks are asked to tell of their steps."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array

import msgspec
import pytest

from labinfer.base.rank_stats import Slices
from labinfer.server.gateway import cluster_history
from labinfer.server.gateway.cluster_history import MAX_BEHIND, ClusterHistory
from labinfer.server.gateway.point_history import HISTORY_SECONDS, POINT_SECONDS, merge_stats_points
from labinfer.server.gateway.recent_latencies import RecentLatencies
from labinfer.server.link.frames import RankShardInfo, Trace
from labinfer.server.link.stats import Drift, EngineStats, RankStats, TracedStep

RANKS = [
    RankShardInfo(
        rank=n,
        stage=n,
        tp_rank=0,
        host="here",
        device="cpu",
        first_layer=n,
        num_layers=1,
        dtype="float32",
        kv_dtype="float32",
        quantization="none",
        weight_bytes=10,
        kv_bytes=20,
    )
    for n in range(2)
]


class Told(list):
    """What ``tell`` was called with."""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def history(clock, told) -> ClusterHistory:
    return ClusterHistory(["a", "b"], told.append, lambda model: (2, 1), RecentLatencies(["a", "b"], clock), clock)


def rank(number: int, busy: float, when: float) -> RankStats:
    return RankStats(
        rank=number,
        stage=number,
        tp_rank=0,
        num_threads=1,
        cpus=str(number),
        busy_seconds=busy,
        when=when,
        private_memory=7,
    )


def stats(model: str = "a", steps: int = 0, tokens: int = 0, generated: int = 0, ranks=()) -> EngineStats:
    return EngineStats(
        model=model, num_steps=steps, step_tokens=tokens, generation_tokens=generated, kv_usage=0.25, ranks=list(ranks)
    )


def slices(*of: tuple[str, int, int, int], clock: int = 0, dropped: int = 0) -> Slices:
    """From (name, begin and end in nanoseconds, step)."""
    names = list(dict.fromkeys(name for name, *_ in of))
    numbers = array("q", [n for name, begin, end, step in of for n in (names.index(name), begin, end, step, 3, 1)])
    return Slices(names, numbers.tobytes(), clock, dropped)


def step(number: int) -> TracedStep:
    return TracedStep(number, 3, 1, 2, [("17:chatcmpl-x", 2, 0, False), ("18:mine", 1, 40, True)])


def read(data: bytes) -> dict:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    return json.loads(data[6:])


def test_figures_are_over_the_time_since_the_last_ones(history, clock):
    clock.now += 1
    history.add_stats(stats(ranks=[rank(0, 1.0, 50.0), rank(1, 2.0, 70.0)]))
    clock.now += 2
    history.add_stats(stats(steps=10, tokens=80, generated=60, ranks=[rank(0, 1.5, 52.0), rank(1, 2.0, 70.0)]))
    first, second = history.points("a")
    assert first.steps_per_second == 0 and [one.busy for one in first.ranks] == [None, None]
    assert second.time_us == 1003_000_000
    assert (second.steps_per_second, second.tokens_per_step) == (5.0, 8.0)
    assert second.generation_tokens_per_second == 30.0
    busy = [one.busy for one in second.ranks]
    assert busy == [0.25, None], "rank 1 has told nothing new"
    assert history.points("b") == []
    assert history.rank_stats("a")[1].cpus == "1" and history.rank_stats("b") == {}


def steps_of(number: int, steps: int, busy: float, stage: int | None = None) -> RankStats:
    fields = {"num_steps": steps, "stage": number if stage is None else stage}
    return msgspec.structs.replace(rank(number, busy, 0.0), **fields)


def test_stages_are_told_by_their_slowest_ranks_over_the_last_minute(history, clock):
    assert history.present("a")["stages"] == []
    for second in range(200):
        clock.now += 1
        ranks = [steps_of(0, 10 * second, second), steps_of(1, 10 * second, 2 * second, 1)]
        busy = second if second < 120 else 4 * second - 360  # 0.1 seconds a step, and 0.4 later
        ranks.append(steps_of(2, 10 * second, busy, 1))
        history.add_stats(stats(steps=10 * second, ranks=ranks))
    first, second = history.present("a")["stages"]
    assert (first.stage, first.rank, first.step_seconds) == (0, 0, pytest.approx(0.1))
    assert (second.stage, second.rank, second.step_seconds) == (1, 2, pytest.approx(0.4))
    assert second.predicted_seconds is None and second.slowdown is None
    history.begin()
    assert history.present("a")["stages"] == []


def test_stages_are_told_with_their_drift(history, clock):
    drift = Drift(factors=[0.5, 2.0], slow=1, rank=1, layers=[], gain=0.0)
    for second in range(3):
        clock.now += 1
        told = stats(ranks=[steps_of(0, 10 * second, 1.0 * second), steps_of(1, 10 * second, 4.0 * second)])
        history.add_stats(msgspec.structs.replace(told, drift=drift))
    first, second = history.present("a")["stages"]
    assert (first.step_seconds, first.predicted_seconds, first.slowdown) == pytest.approx((0.1, 0.2, 0.5))
    assert (second.step_seconds, second.predicted_seconds, second.slowdown) == pytest.approx((0.4, 0.2, 2.0))


def test_stages_keep_their_times_in_a_pause(history, clock):
    for second in range(10):
        clock.now += 1
        history.add_stats(stats(ranks=[steps_of(0, 10 * second, 2.0 * second)]))
    clock.now += 1000
    assert [stage.step_seconds for stage in history.present("a")["stages"]] == [pytest.approx(0.2)]
    history.add_stats(stats(ranks=[steps_of(0, 100, 20.0)]))  # the first steps after it
    assert [stage.step_seconds for stage in history.present("a")["stages"]] == [pytest.approx(0.2)]


def test_history_is_an_hour_and_coarser_before_the_last_minutes(history, clock):
    for second in range(4000):
        clock.now += 1
        history.add_stats(stats(steps=4 * second, tokens=12 * second, generated=8 * second))
    points = history.points("a")
    fine = [one for one in points if one.seconds == 1]
    assert 299 <= len(fine) <= 311 and 328 <= len(points) - len(fine) <= 332
    assert {one.seconds for one in points[1 : -len(fine)]} <= {10.0, *range(1, 10)}
    assert clock.now - points[0].time_us / 1e6 == pytest.approx(3600, abs=11)
    assert [one.time_us for one in points] == sorted({one.time_us for one in points})
    rates = {(one.steps_per_second, one.tokens_per_step, one.generation_tokens_per_second) for one in points}
    assert rates == {(4.0, 3.0, 8.0)}
    clock.now += 200
    assert 99 <= len([one for one in history.points("a") if one.seconds == 1]) <= 111, "without new stats, too"
    clock.now += 3600
    assert history.points("a") == []


def test_merged_points_keep_the_rates_of_all_their_time(history, clock):
    """Three seconds with ten steps, and one second with two steps of more tokens."""
    clock.now += 1
    history.add_stats(stats(ranks=[rank(0, 0.0, 0.0)]))
    clock.now += 3
    history.add_stats(stats(steps=10, tokens=10, generated=30, ranks=[rank(0, 3.0, 3.0)]))
    clock.now += 1
    history.add_stats(stats(steps=12, tokens=32, generated=30, ranks=[rank(0, 3.0, 4.0)]))
    _, first, second = history.points("a")
    merged = merge_stats_points(first, second)
    assert (merged.time_us, merged.seconds) == (second.time_us, 4.0)
    assert (merged.steps_per_second, merged.tokens_per_step) == (3.0, pytest.approx(32 / 12))
    assert merged.generation_tokens_per_second == 7.5
    assert merged.ranks[0].busy == 0.75


def test_points_after_a_pause_do_not_cover_it(history, clock):
    clock.now += 1
    history.add_stats(stats())
    clock.now += 600
    history.add_stats(stats(steps=1))
    assert history.points("a")[-1].seconds == POINT_SECONDS


def test_points_count_open_requests_cache_hits_and_preemptions_of_the_last_minute(history, clock):
    for second in range(100):
        clock.now += 1
        hits = 5 * min(second, 60)
        counts = {
            "running": 3,
            "prefix_cache_queries": 10 * second,
            "prefix_cache_hits": hits,
            "num_preemptions": second,
        }
        history.add_stats(msgspec.structs.replace(stats(), **counts))
    first, *_, last = history.points("a")
    assert (last.running, last.waiting, last.sequences) == (2, 1, 3)
    assert first.prefix_cache_hit_rate is None and first.preemptions == 0
    assert 60 <= last.preemptions <= 65
    assert 0.1 < last.prefix_cache_hit_rate < 0.25, "hits ended 40 seconds ago"
    assert (last.ttft, last.time_per_output_token, last.queue_time) == (None, None, None)


def test_figures_of_short_requests_are_no_more_than_others(history, clock):
    """Each of them makes an idle engine tell that it has work, and that it has none."""
    for number in range(1000):
        clock.now += 0.01
        history.add_stats(stats(steps=number + 1, tokens=2 * number + 2))
    points = history.points("a")
    assert 20 <= len(points) <= 25
    assert all(99 < one.steps_per_second < 101 and one.tokens_per_step == 2 for one in points[1:])


def test_rates_stay_within_reason_when_the_clock_is_set_back(history, clock):
    for number in range(20):
        clock.now += -30 if number == 10 else 0.5
        history.add_stats(stats(steps=10 * number + 10))
    assert max(one.steps_per_second for one in history.points("a")) <= 40


def test_ranks_are_asked_while_anybody_watches_any_model(history, told):
    with history.watching("a"):
        assert told == [True]
        with history.watching("b"), history.watching("a"):
            assert told == [True]
        assert told == [True]
    assert told == [True, False]


def test_watchers_get_what_is_of_their_model(history):
    async def run() -> None:
        with history.watching("a") as first, history.watching("a") as second, history.watching("b") as other:
            history.add_stats(stats())
            history.add_trace(
                Trace("a", [step(5)], [(1, slices(("run", 2_000, 5_000, 5), clock=1_000_000, dropped=4))])
            )
            for watcher in (first, second):
                assert read(await watcher.next())["object"] == "cluster.stats"
                seen = read(await watcher.next())
                assert seen == {
                    "object": "cluster.steps",
                    "begin_us": 1002,
                    "end_us": 1005,
                    "dropped": 4,
                    "steps": [
                        {
                            "step": 5,
                            "prefill_tokens": 2,
                            "decode_tokens": 1,
                            "num_sequences": 2,
                            "sequences": [
                                {"request": "chatcmpl-x", "tokens": 2, "context": 0, "decode": False},
                                {"request": "mine", "tokens": 1, "context": 40, "decode": True},
                            ],
                        }
                    ],
                    "ranks": [{"rank": 1, "slices": [["run", 1002, 1005, 5]]}],
                }
            assert await other.next(seconds=0.01) is None
            history.add_trace(Trace("a", [step(6)], []))
            assert read(await first.next())["begin_us"] is None

    asyncio.run(run())


def test_slow_watcher_misses_the_oldest(history):
    async def run() -> None:
        with history.watching("a") as watcher:
            for number in range(MAX_BEHIND + 3):
                history.add_trace(Trace("a", [step(number)], []))
            got = [read(await watcher.next())["steps"][0]["step"] for _ in range(MAX_BEHIND)]
            assert got == list(range(3, MAX_BEHIND + 3))

    asyncio.run(run())


def test_watching_ends_with_the_engine(history):
    async def run() -> None:
        with history.watching("a") as before:
            history.end()
            assert await before.next() is None
        with history.watching("a") as after:
            assert await after.next() is None

    asyncio.run(run())


def test_counters_of_another_host_begin_anew(history, clock):
    clock.now += 1
    history.add_stats(stats(steps=100, generated=1000))
    history.end()
    clock.now += 60
    history.begin()
    clock.now += 2
    history.add_stats(stats(steps=10, generated=20))
    last = history.points("a")[-1]
    assert (last.steps_per_second, last.generation_tokens_per_second) == (5.0, 10.0)


def test_another_host_is_asked_where_somebody_watches(history, told):
    async def run() -> None:
        history.end()
        with history.watching("a") as early:
            assert await early.next() is None
            del told[:]
            history.begin()
            assert told == [True]
            with history.watching("a") as watcher:
                history.add_trace(Trace("a", [step(1)], []))
                assert read(await watcher.next())["steps"][0]["step"] == 1
        del told[:]
        history.begin()
        assert told == []

    asyncio.run(run())


def test_tracks_are_of_what_was_seen_since_then(history, clock):
    with history.watching("a"):
        history.add_trace(Trace("a", [], [(0, slices(("run", 1, 9, 0))), (1, slices(("run", 2, 3, 0)))]))
        clock.now += 10
        history.add_trace(Trace("a", [], [(1, slices(("step", 20, 40, 1), ("run", 25, 30, 1)))]))
    first, second = history.tracks("a", RANKS)
    assert (first.rank, first.stage) == (0, 0) and [one.name for one in first.slices] == ["run"]
    assert [(one.name, one.begin) for one in second.slices] == [("run", 2), ("step", 20), ("run", 25)]
    first, second = history.tracks("a", RANKS, since=clock.now - 1)
    assert first.slices == [] and [one.name for one in second.slices] == ["step", "run"]


def test_tracks_are_of_so_many_seconds_by_the_clock_of_each_rank(history):
    second, ahead = 10**9, 7 * 10**12
    steps = [("wait for a plan", 0, 5 * second, -1)]
    steps += [("run", begin * second // 2, begin * second // 2 + 9, begin) for begin in range(10, 20)]
    late = [(name, begin + ahead, end + ahead, step) for name, begin, end, step in steps]
    history.add_trace(Trace("a", [], [(0, slices(*steps)), (1, slices(*late))]))
    for track in history.tracks("a", RANKS, seconds=2):
        assert [one.step_id for one in track.slices] == [-1, 10, 11, 12, 13]


def test_only_so_much_is_kept_of_what_was_seen(history, monkeypatch):
    one = slices(("run", 1, 9, 0))
    monkeypatch.setattr(cluster_history, "KEPT_BYTES", 3 * len(one.numbers))
    for _ in range(10):
        history.add_trace(Trace("a", [], [(0, one)]))
    assert len(history.tracks("a", RANKS)[0].slices) == 3


def test_trace_does_not_go_back_to_when_somebody_looked_before(history, clock):
    history.add_trace(Trace("a", [], [(0, slices(("run", 1, 9, 0)))]))
    clock.now += HISTORY_SECONDS + 1
    assert len(history.tracks("a", RANKS)[0].slices) == 1, "it is what there is"
    history.add_trace(Trace("a", [], [(0, slices(("run", 20, 30, 5)))]))
    assert [one.step_id for one in history.tracks("a", RANKS)[0].slices] == [5]


def test_trace_does_not_begin_with_an_hour_without_work(history):
    hour, second = 3600 * 10**9, 10**9
    waits = slices(
        ("wait for a plan", 0, hour, -1), ("run", hour, hour + 5, 7), ("wait for a plan", hour + 5, hour + second, -1)
    )
    history.add_trace(Trace("a", [], [(1, waits)]))
    _, track = history.tracks("a", RANKS)
    assert [(one.name, one.begin) for one in track.slices] == [("run", hour), ("wait for a plan", hour + 5)]


def test_steps_are_not_kept(history):
    """Those of a large batch take more than their slices do, and may come without any."""
    one = step(1)
    before = sys.getrefcount(one)
    history.add_trace(Trace("a", [one], []))
    assert sys.getrefcount(one) == before
