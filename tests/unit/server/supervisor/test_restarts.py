"""When a group that died is started again."""

from __future__ import annotations

from labinfer.server.supervisor.restarts import RESET_SECONDS, Restarts


def test_pauses_double_until_restarts_are_used_up():
    restarts = Restarts(8)
    assert [restarts.next_pause(1.0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, None]


def test_restarts_are_forgotten_after_a_long_life():
    restarts = Restarts(2)
    assert [restarts.next_pause(1.0) for _ in range(2)] == [0, 1]
    assert restarts.next_pause(RESET_SECONDS) == 0
    assert (restarts.next_pause(1.0), restarts.next_pause(1.0)) == (1, None)


def test_none_is_allowed():
    assert Restarts(0).next_pause(1.0) is None
