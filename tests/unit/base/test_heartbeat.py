"""HeartbeatMonitor: who is silent for too long, and when nobody may be blamed."""

from __future__ import annotations

import pytest

from labinfer.base.heartbeat import START_SECONDS, HeartbeatMonitor

TIMEOUT = 30.0


@pytest.fixture
def heartbeat(clock):
    return HeartbeatMonitor("abc", TIMEOUT, clock)


def beat(heartbeat, clock, peers, seconds) -> list:
    """Let peers give signs of life; those who are given up meanwhile, and after how many seconds."""
    begin, silent = clock.now, []
    while clock.now - begin < seconds and not silent:
        clock.now += heartbeat.interval
        for peer in peers:
            heartbeat.hear(peer)
        silent = heartbeat.silent()
    return silent


def test_peers_that_are_heard_are_never_given_up(heartbeat, clock):
    assert beat(heartbeat, clock, "abc", 1000) == []


def test_silent_peer_is_given_up_within_the_timeout(heartbeat, clock):
    beat(heartbeat, clock, "abc", 10)
    begin = clock.now
    assert beat(heartbeat, clock, "ac", 1000) == ["b"]
    assert TIMEOUT / 2 < clock.now - begin <= TIMEOUT


def test_all_that_fell_silent_together_are_named_together(heartbeat, clock):
    beat(heartbeat, clock, "abc", 10)
    beat(heartbeat, clock, "ac", heartbeat.interval)
    assert beat(heartbeat, clock, "a", 1000) == ["b", "c"]


def test_peer_that_has_not_been_heard_yet_may_be_starting(heartbeat, clock):
    assert beat(heartbeat, clock, "ab", START_SECONDS) == []
    assert beat(heartbeat, clock, "ab", TIMEOUT) == ["c"]


def test_whoever_was_stopped_itself_blames_nobody(heartbeat, clock):
    beat(heartbeat, clock, "abc", 10)
    clock.now += 1000  # Ctrl-Z, fg
    assert heartbeat.silent() == []
    assert beat(heartbeat, clock, "ab", 1000) == ["c"]


def test_peer_of_whom_no_more_is_expected_is_not_missed(heartbeat, clock):
    beat(heartbeat, clock, "abc", 10)
    heartbeat.forget("c")
    heartbeat.hear("c")
    assert beat(heartbeat, clock, "ab", 1000) == []
