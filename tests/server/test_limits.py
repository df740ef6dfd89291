"""AdmissionControl: who is admitted when, and that nothing is left behind in whatever order requests end."""

from __future__ import annotations

import asyncio

import pytest
from fake_clock import FakeClock, settle

from labinfer.requests.openai.api_errors import ApiError
from labinfer.server.gateway.access import ApiCaller
from labinfer.server.gateway.admission_control import FIRST_SWEEP, MAX_REMEMBERED, AdmissionControl
from labinfer.server.gateway.options import ServerOptions
from tests.refusals import refused

ANN, BOB = ApiCaller("ann"), ApiCaller("bob")


def make(clock: FakeClock | None = None, **options) -> AdmissionControl:
    return AdmissionControl(ServerOptions(**{"max_open_requests": 0} | options), clock or FakeClock())


def run(test):
    """A coroutine function as a test; one that waits for nothing to come is ended."""

    def run_it(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    run_it.__name__, run_it.__doc__ = test.__name__, test.__doc__
    return run_it


@run
async def test_without_limits_everything_is_admitted_and_forgotten():
    limits = make()
    leases = [await limits.admit(ANN, None, 10**6) for _ in range(100)]
    assert limits.num_open == 100
    for lease in leases:
        lease.spend(10**6)
        lease.close()
    assert limits.num_open == limits.num_callers == 0


@run
async def test_beyond_its_concurrent_requests_a_caller_is_refused_and_others_are_not():
    limits = make(max_concurrent_requests=2)
    first, _ = [await limits.admit(ANN, None, 1) for _ in range(2)]
    with refused(429) as caught:
        await limits.admit(ANN, None, 1)
    assert caught.value.type == "requests" and caught.value.retry_after_seconds > 0
    assert "2 concurrent requests" in caught.value.message == str(caught.value)
    assert limits.num_open == 2  # the refused one is none
    await limits.admit(BOB, None, 1)
    await limits.admit(ANN, "carol", 1)  # a user of the same key
    await limits.admit(BOB, "carol", 1)  # no user of this one
    first.close()
    await limits.admit(ANN, None, 1)


@run
async def test_no_user_and_an_empty_one_are_the_same():
    limits = make(max_concurrent_requests=1)
    await limits.admit(ANN, None, 1)
    with refused(429):
        await limits.admit(ANN, "", 1)


@run
async def test_lease_is_closed_once_however_often():
    limits = make(max_concurrent_requests=1)
    with await limits.admit(ANN, None, 1) as lease:
        lease.close()
        second = await limits.admit(ANN, None, 1)
    lease.close()
    with refused(429):
        await limits.admit(ANN, None, 1)
    second.close()
    assert limits.num_open == limits.num_callers == 0
    with pytest.raises(AssertionError):
        lease.spend(1)


@run
async def test_lease_is_closed_by_an_error_in_its_with():
    limits = make(max_concurrent_requests=1)
    with pytest.raises(ZeroDivisionError):
        with await limits.admit(ANN, None, 1):
            raise ZeroDivisionError
    assert limits.num_open == 0


@run
async def test_with_a_queue_requests_await_their_turn_in_order():
    limits = make(max_concurrent_requests=1, max_waiting_per_caller=2)
    lease, order = await limits.admit(ANN, None, 1), []

    async def take(name: str) -> None:
        with await limits.admit(ANN, None, 1):
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(take(name)) for name in "ab"]
    await settle()
    assert order == [] and limits.num_open == 3
    with refused(429, match="2 more are waiting"):
        await limits.admit(ANN, None, 1)
    lease.close()
    await take("c")  # the place has an heir already: nobody slips in before it
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert limits.num_open == limits.num_callers == 0


@run
async def test_cancelled_waiter_leaves_no_trace():
    clock = FakeClock()
    limits = make(clock, max_concurrent_requests=1, max_waiting_per_caller=1, tokens_per_minute=100)
    lease = await limits.admit(ANN, None, 10)
    waiting = asyncio.create_task(limits.admit(ANN, None, 89))
    await settle()
    waiting.cancel()
    await settle()
    assert limits.num_open == 1
    lease.spend(89)  # its prompt was given back: one token is left
    waiting = asyncio.create_task(limits.admit(ANN, None, 0))
    await settle()
    assert limits.num_open == 2
    lease.close()
    (await waiting).close()
    clock.now += 60
    await limits.admit(ANN, None, 1)
    assert limits.num_open == 1


@run
async def test_waiter_that_is_cancelled_when_its_turn_has_come_hands_it_on():
    limits = make(max_concurrent_requests=1, max_waiting_per_caller=2)
    lease = await limits.admit(ANN, None, 1)
    first, second = (asyncio.create_task(limits.admit(ANN, None, 1)) for _ in range(2))
    await settle()
    lease.close()  # first has its turn, but has not run yet
    first.cancel()
    await settle()
    assert first.cancelled() and second.done()
    second.result().close()
    assert limits.num_open == limits.num_callers == 0


@run
async def test_turn_is_not_given_to_one_that_is_about_to_notice_its_end():
    limits = make(max_concurrent_requests=1, max_waiting_per_caller=1)
    lease = await limits.admit(ANN, None, 1)
    waiting = asyncio.create_task(limits.admit(ANN, None, 1))
    await settle()
    waiting.cancel()
    lease.close()  # before the task could run
    newcomer = await limits.admit(ANN, None, 1)
    await settle()
    assert waiting.cancelled() and limits.num_open == 1
    last = asyncio.create_task(limits.admit(ANN, None, 1))
    await settle()
    assert not last.done()  # the newcomer's account is still the one that counts
    newcomer.close()
    (await last).close()
    assert limits.num_open == limits.num_callers == 0


@run
async def test_all_callers_together_are_bounded_waiting_ones_included():
    limits = make(max_open_requests=3, max_concurrent_requests=1, max_waiting_per_caller=1)
    ann = await limits.admit(ANN, None, 1)
    waiting = asyncio.create_task(limits.admit(ANN, None, 1))
    await settle()
    await limits.admit(BOB, None, 1)
    with refused(503) as caught:
        await limits.admit(ApiCaller("carol"), None, 1)
    assert caught.value.retry_after_seconds > 0
    assert limits.num_callers == 2  # who is not admitted is not remembered
    with refused(429):  # its own limit is what this one has to hear of
        await limits.admit(ANN, None, 1)
    waiting.cancel()
    await settle()
    await limits.admit(ApiCaller("carol"), None, 1)
    ann.close()
    assert limits.num_open == 2


@run
async def test_budget_is_of_prompts_and_answers_and_fills_up_again():
    clock = FakeClock()
    limits = make(clock, tokens_per_minute=60)
    lease = await limits.admit(ANN, None, 50)
    lease.spend(10)
    with refused(429, match="60 tokens per minute") as caught:
        await limits.admit(ANN, None, 1)
    assert caught.value.type == "tokens" and caught.value.retry_after_seconds == pytest.approx(1)
    await limits.admit(BOB, None, 1)
    await limits.admit(ANN, "carol", 1)
    clock.now += caught.value.retry_after_seconds
    await limits.admit(ANN, None, 1)
    with refused(429):
        await limits.admit(ANN, None, 0)


@run
async def test_debt_is_paid_off_before_the_next_request():
    clock = FakeClock()
    limits = make(clock, tokens_per_minute=60)
    lease = await limits.admit(ANN, None, 200)  # more than a minute has, so that it is not refused for ever
    lease.spend(39)
    with refused(429) as caught:
        await limits.admit(ANN, None, 1)
    assert caught.value.retry_after_seconds == pytest.approx(180)
    lease.close()
    clock.now += 178
    with refused(429):  # closing it changed nothing
        await limits.admit(ANN, None, 1)
    clock.now += 2
    await limits.admit(ANN, None, 1)


@run
async def test_long_rest_saves_up_no_more_than_a_minutes_tokens():
    clock = FakeClock()
    limits = make(clock, tokens_per_minute=60)
    await limits.admit(ANN, None, 1)
    clock.now += 10**6
    await limits.admit(ANN, None, 60)
    with refused(429):
        await limits.admit(ANN, None, 0)


@run
async def test_client_that_obeys_retry_after_gets_the_average_it_may_have():
    clock = FakeClock()
    limits = make(clock, tokens_per_minute=600)
    taken, begin = 0, clock.now
    while clock.now - begin < 3600:
        try:
            with await limits.admit(ANN, None, 170) as lease:
                lease.spend(130)
            taken += 300
        except ApiError as error:
            clock.now += error.retry_after_seconds
    assert 600 * 60 <= taken <= 600 * 61 + 300  # an hour, the first minute's worth, and the last request's debt


@run
async def test_old_callers_are_forgotten_and_debts_are_not():
    clock = FakeClock()
    limits = make(clock, tokens_per_minute=60)
    (await limits.admit(ANN, "in debt", 10**6)).close()
    running = await limits.admit(ANN, "running", 1)
    for number in range(20_000):  # ten in a second, after which they owe nothing
        (await limits.admit(ANN, f"user {number}", 1)).close()
        clock.now += 0.1
    assert limits.num_callers <= 2 * FIRST_SWEEP
    with refused(429):
        await limits.admit(ANN, "in debt", 1)
    running.close()
    assert limits.num_open == 0


@run
async def test_however_many_callers_there_are_memory_is_bounded():
    limits = make(tokens_per_minute=1000)  # nothing fills up again: the clock stands
    for number in range(4 * MAX_REMEMBERED):
        (await limits.admit(ANN, f"user {number}", 1 + number % 7)).close()
    assert limits.num_callers <= 2 * MAX_REMEMBERED + 1


@run
async def test_users_with_long_names_are_told_apart_by_their_beginning_only():
    limits = make(max_concurrent_requests=1)
    await limits.admit(ANN, "x" * 10**6, 1)
    with refused(429):
        await limits.admit(ANN, "x" * 10**6 + "y", 1)
    assert max(len(user) for _, user in limits._accounts) <= 256
