"""Telemetry: when figures go to the gateway, and what of the ranks' slices goes with them."""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from labinfer.base.plan import BatchEntry, BatchPlan
from labinfer.base.rank_stats import Slices, WorkerStats
from labinfer.server.host.hosted_model import HostedModel
from labinfer.server.host.telemetry import ALL_SLICES, SHOWN_SEQUENCES, WATCHED_SLICES, WATCHED_STEPS, Telemetry
from labinfer.server.link.frames import StatsUpdate, Trace


class Rank:
    """Stands for a rank's StatsReporter: its slices, and its steps, are how often it was asked before."""

    def __init__(self, rank: int):
        self.rank, self.capacity, self.asked, self.busy = rank, 0, 0, 0.0

    def report(self, num_slices: int) -> WorkerStats:
        slices = Slices(["run"], array("q", [0, self.asked, 1, 0, 1, 1]).tobytes(), 0, 0) if self.capacity else None
        self.asked, self.capacity = self.asked + 1, num_slices
        return WorkerStats(
            rank=self.rank,
            stage=self.rank,
            tp_rank=0,
            num_steps=self.asked,
            busy_time=self.busy,
            peak_memory=0,
            private_memory=0,
            weight_bytes_read=0,
            num_threads=1,
            cpus="0",
            slices=slices,
            energy={"package-0": float(self.asked)},
        )


class HealthChannel:
    """To one other rank, which answers at once unless it is ``slow``."""

    def __init__(self, num_models: int = 1):
        self.ranks = [Rank(1) for _ in range(num_models)]
        self.stats: dict[int, bytes] = {}
        self.slow = False

    def ask_stats(self, detail: int) -> None:
        data = msgspec.msgpack.encode([rank.report(detail) for rank in self.ranks])
        if not self.slow:
            self.stats[1] = data


def served(name: str = "a", num_ranks: int = 2) -> HostedModel:
    scheduler = SimpleNamespace(counts=Counter(), running=[], waiting=[])
    engine = SimpleNamespace(scheduler=scheduler, blocks=SimpleNamespace(usage=0.0), has_work=True)
    llm = SimpleNamespace(engine=engine, stats=Rank(0), group=SimpleNamespace(everyone=range(num_ranks)))
    return HostedModel(name=name, llm=llm, recommended={})


def batch_of(step_id: int, num_sequences: int) -> SimpleNamespace:
    entries = [
        BatchEntry(
            seq_id=n,
            num_tokens=1,
            begin=n,
            position=0,
            first_block=0,
            new_blocks=[],
            num_samples=1,
            is_decode=n % 2 == 0,
        )
        for n in range(num_sequences)
    ]
    sequences = [SimpleNamespace(request=SimpleNamespace(key=f"{n}:id")) for n in range(num_sequences)]
    return SimpleNamespace(
        plan=BatchPlan(step_id=step_id, starts=[], finished=[], moves=[], entries=entries), sequences=sequences
    )


def slices_in(frames: list) -> dict[int, list[int]]:
    """Of each rank, which of its reports have come."""
    found: dict[int, list[int]] = {}
    for frame in frames:
        for rank, some in frame.slices if isinstance(frame, Trace) else ():
            found.setdefault(rank, []).append(array("q", some.numbers)[1])
    return found


def test_figures_come_once_a_second_and_then_when_work_ends_and_twice_more(clock):
    sent: list = []
    telemetry = Telemetry([served()], sent.append, HealthChannel(), clock)
    for is_working in [True] * 21 + [False] * 50:
        telemetry.send_if_due(is_working)
        clock.now += 0.25
    assert all(isinstance(frame, StatsUpdate) for frame in sent)
    assert len(sent) == 6 + 1 + 2
    assert [rank.rank for rank in sent[-1].engines[0].ranks] == [0, 1]
    assert [rank.energy["package-0"] for rank in sent[-1].engines[0].ranks] == [
        rank.num_steps for rank in sent[-1].engines[0].ranks
    ], "as Rank numbers them"


def test_what_is_told_last_is_of_when_the_work_had_ended(clock):
    sent: list = []
    one, health_channel = served(), HealthChannel()
    telemetry = Telemetry([one], sent.append, health_channel, clock)
    for _ in range(10):
        telemetry.send_if_due(True)
        clock.now += 0.25
    at_end = [one.llm.stats.asked, health_channel.ranks[0].asked]
    for _ in range(20):
        telemetry.send_if_due(False)
        clock.now += 0.25
    last = sent[-1].engines[0].ranks
    assert all(rank.num_steps >= asked for rank, asked in zip(last, at_end, strict=True)), "as Rank numbers them"


def test_ranks_are_not_asked_whenever_short_requests_come_and_go(clock):
    sent: list = []
    one = served()
    telemetry = Telemetry([one], sent.append, HealthChannel(), clock)
    telemetry.watch(True)
    asked = one.llm.stats.asked
    for number in range(500):
        clock.now += 0.01
        telemetry.send_if_due(number % 2 == 0)
    assert 9 <= one.llm.stats.asked - asked <= 11
    assert sum(isinstance(frame, StatsUpdate) for frame in sent) >= 499, "who works and who waits is told at once"


def test_bubbles_only_grow_and_are_of_the_time_that_the_ranks_have_told_of(clock):
    """A rank that computes all the time the engine has work has none, though its own figures come late."""
    sent: list = []
    one, health_channel = served(), HealthChannel()
    telemetry = Telemetry([one], sent.append, health_channel, clock)
    for number in range(60):
        is_working = number // 10 % 2 == 0
        if is_working:
            one.working_seconds += 0.25
            one.llm.stats.busy += 0.25
            health_channel.ranks[0].busy += 0.125
        telemetry.send_if_due(is_working)
        clock.now += 0.25
    own, other = ([frame.engines[0].ranks[rank].bubble_seconds for frame in sent[4:]] for rank in (0, 1))
    assert set(own) == {0.0}
    assert other == sorted(other) and other[-1] == 30 * 0.125


def test_while_somebody_watches_both_ranks_tell_of_the_same_time(clock):
    sent: list = []
    one, health_channel = served(), HealthChannel()
    telemetry = Telemetry([one], sent.append, health_channel, clock)
    telemetry.send_if_due(True)
    telemetry.watch(True)
    own, other = one.llm.stats, health_channel.ranks[0]
    assert own.capacity == other.capacity == WATCHED_SLICES
    first = own.asked, other.asked
    for _ in range(40):
        clock.now += 0.1
        telemetry.send_if_due(True)
    found = slices_in(sent)
    assert found[0] == list(range(first[0], first[0] + len(found[0]))) and len(found[0]) >= 5
    assert found[1] == list(range(first[1], first[1] + len(found[0])))


def test_what_a_rank_has_told_goes_out_once_however_slow_it_is(clock):
    sent: list = []
    health_channel = HealthChannel()
    telemetry = Telemetry([served()], sent.append, health_channel, clock)
    telemetry.watch(True)
    for number in range(80):
        health_channel.slow = 20 < number < 60
        clock.now += 0.1
        telemetry.send_if_due(True)
    found = slices_in(sent)
    assert len(found[1]) == len(set(found[1])) < len(found[0]) == len(set(found[0]))


def test_nothing_is_told_of_before_somebody_watched_or_after(clock):
    sent: list = []
    one, health_channel = served(), HealthChannel()
    telemetry = Telemetry([one], sent.append, health_channel, clock)
    for on in (True, False, True, False):
        telemetry.watch(on)
        old = one.llm.stats.asked
        del sent[:]
        for _ in range(20):
            clock.now += 0.1
            telemetry.send_if_due(True)
        found = slices_in(sent)
        if on:
            assert min(found[0]) >= old
        else:
            assert not found and one.llm.stats.capacity == health_channel.ranks[0].capacity == 0
            assert one.watched == [] and one.watched_most == 0


def test_step_names_its_first_sequences(clock):
    sent: list = []
    one = served()
    telemetry = Telemetry([one], sent.append, HealthChannel(), clock)
    telemetry.watch(True)
    assert one.watched_most == WATCHED_STEPS
    one.watched += [batch_of(7, 3), batch_of(8, SHOWN_SEQUENCES + 5)]
    clock.now += 1
    telemetry.send_if_due(True)
    small, large = sent[-1].steps
    assert small.sequences == [("0:id", 1, 0, True), ("1:id", 1, 1, False), ("2:id", 1, 2, True)]
    assert (large.step_id, large.num_sequences, len(large.sequences)) == (8, SHOWN_SEQUENCES + 5, SHOWN_SEQUENCES)
    assert one.watched == []


@pytest.mark.parametrize(("num_ranks", "num_models", "each"), [(2, 1, 640), (16, 1, 640), (2, 40, 128), (64, 1, 160)])
def test_many_ranks_and_models_share_what_is_told(clock, num_ranks, num_models, each):
    health_channel = HealthChannel(num_models)
    Telemetry([served(str(n), num_ranks) for n in range(num_models)], lambda frame: None, health_channel, clock).watch(
        True
    )
    assert {rank.capacity for rank in health_channel.ranks} == {each}
    assert each * num_ranks * num_models <= ALL_SLICES


def test_no_health_channel_is_needed_by_a_rank_alone(clock):
    sent: list = []
    telemetry = Telemetry([served(num_ranks=1)], sent.append, None, clock)
    telemetry.watch(True)
    for _ in range(20):
        clock.now += 0.1
        telemetry.send_if_due(True)
    assert list(slices_in(sent)) == [0]
