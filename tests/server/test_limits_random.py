"""AdmissionControl in any order of events: bounds hold, nobody waits beside a free place, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from fake_clock import FakeClock, settle
from hypothesis import given, settings
from hypothesis import strategies as st

from labinfer.requests.openai.api_errors import ApiError
from labinfer.server.gateway.access import ApiCaller
from labinfer.server.gateway.admission_control import AdmissionControl
from labinfer.server.gateway.options import ServerOptions

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 2), st.integers(0, 40)),
        st.tuples(st.just("close"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("spend"), st.integers(0, 30), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.just(0), st.integers(0, 90)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(
    actions=ACTIONS,
    max_running=st.integers(0, 3),
    max_waiting=st.integers(0, 3),
    max_open=st.integers(0, 6),
    budget=st.sampled_from([0, 0, 30, 100]),
)
def test_bounds_hold_and_nothing_leaks_in_any_order_of_events(actions, max_running, max_waiting, max_open, budget):
    options = ServerOptions(
        max_concurrent_requests=max_running,
        max_waiting_per_caller=max_waiting if max_running else 0,
        max_open_requests=max_open,
        tokens_per_minute=budget,
    )

    async def play() -> None:
        clock = FakeClock()
        limits = AdmissionControl(options, clock)
        callers = [ApiCaller(name) for name in "abc"]
        tasks: list[tuple[int, asyncio.Task]] = []
        begun, granted = defaultdict(list), defaultdict(list)
        refused = set()

        async def ask(number: int, who: int, tokens: int):
            begun[who].append(number)
            try:
                lease = await limits.admit(callers[who], None, tokens)
            except ApiError:
                refused.add(number)
                return None
            granted[who].append(number)
            return lease

        def leases(who: int | None = None) -> list:
            return [
                task.result()
                for owner, task in tasks
                if who in (None, owner) and task.done() and not task.cancelled() and task.result()
            ]

        def held(who: int | None = None) -> list:
            return [lease for lease in leases(who) if lease._is_open]

        for kind, index, amount in actions:
            if kind == "admit":
                tasks.append((index, asyncio.create_task(ask(len(tasks), index, amount))))
            elif kind == "cancel" and tasks:
                tasks[index % len(tasks)][1].cancel()
            elif kind == "close" and leases():
                leases()[index % len(leases())].close()
            elif kind == "spend" and held():
                held()[index % len(held())].spend(amount)
            elif kind == "wait":
                clock.now += amount
            elif kind == "settle":
                await settle()
                open_tasks = [task for _, task in tasks if not task.done()]
                assert limits.num_open == len(held()) + len(open_tasks)  # what is not done now is waiting
                for who in range(3):
                    waiting = [task for owner, task in tasks if owner == who and not task.done()]
                    assert len(waiting) <= max_waiting
                    assert not waiting or len(held(who)) == max_running  # nobody waits beside a free place
            assert not max_open or limits.num_open <= max_open
            for who in range(3):
                assert not max_running or len(held(who)) <= max_running
        await settle()
        for who in range(3):
            assert granted[who] == sorted(granted[who])  # first come, first served
        for _, task in tasks:
            task.cancel()
        await settle()
        for lease in held():
            lease.close()
        await settle()
        assert limits.num_open == 0
        if not budget:
            assert limits.num_callers == 0
        clock.now += 10**6  # every debt is paid off: all is as it was in the beginning
        for caller in callers:
            for _ in range(2):
                (await limits.admit(caller, None, 0)).close()
        assert limits.num_open == limits.num_callers == 0

    asyncio.run(asyncio.wait_for(play(), 30))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300), st.floats(0, 100)), min_size=1, max_size=40),
    st.integers(1, 1000),
)
def test_over_any_time_a_caller_spends_its_budget_and_one_debt_at_most(requests, budget):
    async def play() -> None:
        clock = FakeClock()
        limits = AdmissionControl(ServerOptions(max_open_requests=0, tokens_per_minute=budget), clock)
        begin, taken, largest = clock.now, 0, 0
        for prompt, generated, pause in requests:
            try:
                with await limits.admit(ApiCaller("ann"), None, prompt) as lease:
                    lease.spend(generated)
                taken += prompt + generated
                largest = max(largest, prompt + generated)
            except ApiError as error:
                assert 0 < error.retry_after_seconds <= (1 + largest) * 60 / budget + 1e-6
            assert taken <= budget * (1 + (clock.now - begin) / 60) + largest + 1e-6
            clock.now += pause

    asyncio.run(play())
