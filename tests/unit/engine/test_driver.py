"""Rank 0's loop: requests by their owners, news of each step, and ends of every kind."""

from __future__ import annotations

from collections import deque

import pytest

from labinfer.base.config import CacheOptions, SchedulerOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import BatchPlan, BatchResult, EntryResult
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.assemble import make_engine
from labinfer.engine.driver import IDLE_SECONDS, EngineDriver
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.spec import EngineSpec
from labinfer.observe.recorder import Recorder

SPEC = EngineSpec(num_blocks=64, vocab_size=100, hidden_size=3, max_model_len=64)


class Echo:
    """An executor whose every sampled token is the id of its step."""

    def __init__(self) -> None:
        self.plans: deque[BatchPlan] = deque()
        self.is_broken = False

    def launch(self, plan: BatchPlan) -> None:
        if self.is_broken:
            raise RuntimeError("a rank is gone")
        self.plans.append(plan)

    def wait_result(self) -> BatchResult:
        plan = self.plans.popleft()
        return BatchResult(plan.step_id, [EntryResult((plan.step_id,) * entry.num_samples) for entry in plan.entries])


@pytest.fixture
def executor() -> Echo:
    return Echo()


@pytest.fixture
def driver(clock, executor) -> EngineDriver:
    options = SchedulerOptions(max_num_seqs=2, max_queued_requests=2)
    engine = make_engine(SPEC, executor, cache=CacheOptions(block_size=4), scheduling=options, clock=clock)
    return EngineDriver(engine, clock, Recorder(0))


def request(max_tokens: int = 2, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(key="not looked at", prompt_token_ids=[1, 2, 3], sampling=params)


def test_news_name_the_owner_and_the_last_ends_the_request(driver):
    driver.add("a", request(max_tokens=2))
    news = driver.step() + driver.step()
    assert [(owner, update.token_ids) for owner, update in news] == [("a", [0]), ("a", [1])]
    assert [update.finish_reason for _, update in news] == [None, FinishReason.LENGTH]
    assert not driver.is_open("a") and not driver.has_work


def test_request_stays_open_until_all_its_answers_have_ended(driver):
    driver.add("a", request(max_tokens=3, n=2))
    driver.step()
    driver.abort("a", index=1, reason=FinishReason.STOP)
    assert driver.is_open("a")
    assert [update.index for _, update in driver.step()] == [0]
    driver.abort("a")
    assert not driver.is_open("a") and driver.engine.blocks.num_free == SPEC.num_blocks
    driver.abort("a")  # which has ended


def test_refused_request_has_no_owner(driver):
    with pytest.raises(UserError, match="outside the vocabulary"):
        driver.add("a", Request(key=0, prompt_token_ids=[100], sampling=SamplingParams()))
    assert not driver.is_open("a") and not driver.has_work


def test_run_feeds_as_many_as_the_engine_looks_at(driver):
    taken = []

    def source():
        for number in range(7):
            taken.append(number)
            yield number, request(max_tokens=1)

    steps = driver.run(source())
    assert [owner for owner, _ in next(steps)] == [0, 1]
    assert len(taken) == 2  # as many wait as run beside each other; none is taken before there is room
    assert [owner for news in steps for owner, _ in news] == [2, 3, 4, 5, 6]


def test_run_offers_a_request_again_that_found_the_queue_full(driver):
    """Two answers to each: where one request waits, there is no room for another in a queue of two."""
    owners = [owner for news in driver.run((name, request(1, n=2)) for name in "abc") for owner, _ in news]
    assert sorted(owners) == ["a", "a", "b", "b", "c", "c"]


def test_run_sleeps_on_the_clock_while_the_source_has_nothing(driver, clock):
    before = clock.now
    source = iter([None, None, ("a", request(max_tokens=1)), None])
    assert [owner for news in driver.run(source) for owner, _ in news] == ["a"]
    assert clock.now - before == pytest.approx(2 * IDLE_SECONDS)  # the last None came while the request ran


def test_run_asks_before_every_step_whether_to_go_on(driver):
    class Stop(Exception):
        pass

    calls = []

    def check():
        calls.append(driver.engine.scheduler.next_step_id)
        if len(calls) == 3:
            raise Stop

    with pytest.raises(Stop):
        list(driver.run([("a", request(max_tokens=5))], check))
    assert calls == [0, 1, 2] and not driver.is_broken
    driver.drain()
    assert not driver.has_work and not driver.is_open("a")


def test_failed_step_breaks_the_driver(driver, executor):
    driver.add("a", request())
    executor.is_broken = True
    with pytest.raises(RuntimeError, match="a rank is gone"):
        driver.step()
    assert driver.is_broken
