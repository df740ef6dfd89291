"""The health channel over real sockets on loopback: failures are told to all, and only failures."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from labinfer.base.errors import PeerLost
from labinfer.comm import health_server
from labinfer.comm.health_channel import GRACE_SECONDS, FaultOptions, HealthChannel
from labinfer.comm.health_messages import Failure, Goodbye, RankHeartbeat, RegisterRank
from labinfer.comm.health_server import HealthServer

KEY = "secret"
PATIENCE = GRACE_SECONDS + 3.0
SOON = FaultOptions(timeout=2.0, hosts=["host-a", "host-b", "host-c"])


class Ends:
    """What each rank's process would have said at its end."""

    def __init__(self) -> None:
        self.said: dict[int, list[str]] = {}
        self._changed = threading.Condition()

    def of(self, rank: int):
        def end(text: str, last: Callable[[], None]) -> None:
            with self._changed:
                self.said.setdefault(rank, []).append(text)
                self._changed.notify_all()
            last()

        return end

    def wait_for(self, *ranks: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(ranks) <= set(self.said), PATIENCE), self.said


def doing(rank: int):
    """What a rank says of itself when it is asked."""
    return lambda: f"rank {rank}: step 7, waiting"


class RawFollower:
    """A follower without the package's thread: it says what it is told to and can vanish."""

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)

    def say(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self.socket.sendall(len(data).to_bytes(4, "little") + data)

    def is_turned_away(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def tie(num_followers: int, ends: Ends, raw: tuple[int, ...] = (), faults: FaultOptions = FaultOptions()):  # noqa: B008
    """Rank 0's health channel and the followers by rank; those in ``raw`` are ``RawFollower``."""
    server, followers, zero = HealthServer(num_followers, KEY), {}, []
    accepting = threading.Thread(target=lambda: zero.append(server.accept_all(5.0, doing(0), ends.of(0), faults)))
    accepting.start()
    for rank in range(1, num_followers + 1):
        if rank in raw:
            followers[rank] = RawFollower(server.port)
            followers[rank].say(RegisterRank(rank, KEY))
        else:
            followers[rank] = HealthChannel.connect(
                rank=rank,
                addresses=["127.0.0.1"],
                port=server.port,
                key=KEY,
                timeout=5.0,
                describe=doing(rank),
                end=ends.of(rank),
                faults=faults,
            )
    accepting.join(PATIENCE)
    return zero[0], followers


def test_followers_failure_is_told_to_all_and_printed_once():
    ends = Ends()
    _, followers = tie(3, ends)
    followers[2].fail("rank 2 failed (OutOfMemory)")
    ends.wait_for(0, 1, 3)
    assert ends.said[0] == ["rank 2 failed (OutOfMemory)"]
    assert ends.said[1] == ends.said[3] == [""]


def test_rank_0s_own_failure_ends_the_followers():
    ends = Ends()
    zero, _ = tie(2, ends)
    zero.fail("rank 0 failed")
    ends.wait_for(1, 2)
    assert 0 not in ends.said  # it ends itself


def test_on_request_every_rank_says_what_it_is_doing_before_the_group_ends():
    ends = Ends()
    _, followers = tie(3, ends, raw=(2,))
    followers[1].fail("rank 1 waited too long", investigate=True)
    ends.wait_for(0, 3)
    *states, last = ends.said[0][0].splitlines()
    assert states[0] == doing(0)() and states[1] == doing(1)() and states[3] == doing(3)()
    assert states[2].startswith("rank 2: no answer")
    assert last == "rank 1 waited too long" and len(states) == 4


def test_rank_0_may_ask_for_states_at_any_time():
    ends = Ends()
    zero, _ = tie(2, ends)
    for _ in range(3):
        assert zero.ask_states() == [doing(rank)() for rank in range(3)]
    assert ends.said == {}


def test_follower_that_vanishes_ends_the_others_and_is_named():
    ends = Ends()
    _, followers = tie(2, ends, raw=(1,))
    begin = time.monotonic()
    followers[1].socket.close()
    ends.wait_for(0, 2)
    assert time.monotonic() - begin >= GRACE_SECONDS  # time for the rank's own account
    assert len(ends.said[0]) == 1 and "rank 1 exited without a message" in ends.said[0][0]
    assert ends.said[2] == [""]


def test_rank_0s_vanishing_ends_a_follower_with_words_of_its_own():
    ends = Ends()
    server = socket.create_server(("127.0.0.1", 0))
    HealthChannel.connect(
        rank=1,
        addresses=["127.0.0.1"],
        port=server.getsockname()[1],
        key=KEY,
        timeout=5.0,
        describe=doing(1),
        end=ends.of(1),
    )
    connection, _ = server.accept()
    connection.close()
    ends.wait_for(1)
    assert len(ends.said[1]) == 1 and "rank 0 exited without a message" in ends.said[1][0]


def test_silent_follower_is_named_with_its_last_state_and_all_end():
    ends = Ends()
    _, followers = tie(2, ends, raw=(2,), faults=SOON)
    followers[2].say(RankHeartbeat("rank 2: step 9, waiting for rank 1"))
    begin = time.monotonic()
    ends.wait_for(0, 1)
    assert time.monotonic() - begin < SOON.timeout + 1.5
    assert "no heartbeat from rank 2 on host-c for 2 s" in ends.said[0][0]
    assert "last state: rank 2: step 9, waiting for rank 1; aborting" in ends.said[0][0]
    assert ends.said[1] == [""]


def test_follower_in_the_middle_of_a_message_is_silent_too():
    ends = Ends()
    _, followers = tie(2, ends, raw=(2,), faults=SOON)
    followers[2].say(RankHeartbeat("rank 2: step 9"))
    followers[2].socket.sendall((1000).to_bytes(4, "little") + b"half")
    ends.wait_for(0, 1)
    assert "rank 2 on host-c" in ends.said[0][0]


def test_silent_rank_0_is_named_by_a_follower():
    ends = Ends()
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    HealthChannel.connect(
        rank=1,
        addresses=["127.0.0.1"],
        port=port,
        key=KEY,
        timeout=5.0,
        describe=doing(1),
        end=ends.of(1),
        faults=SOON,
    )
    connection, _ = server.accept()
    data = msgspec.msgpack.encode(RankHeartbeat("rank 0: step 3"))
    connection.sendall(len(data).to_bytes(4, "little") + data)
    ends.wait_for(1)
    assert "no heartbeat from rank 0 on host-a" in ends.said[1][0] and "rank 0: step 3" in ends.said[1][0]


def test_ranks_that_only_compute_are_not_silent():
    ends = Ends()
    zero, _ = tie(2, ends, faults=SOON)
    time.sleep(2 * SOON.timeout)
    assert ends.said == {}
    zero.close()


def test_nonsense_on_the_line_counts_as_silence():
    ends = Ends()
    _, followers = tie(1, ends, raw=(1,))
    followers[1].socket.sendall(b"\xff\xff\xff\xffgarbage")
    ends.wait_for(0)
    assert "rank 1 exited without a message" in ends.said[0][0]


def test_goodbyes_are_quiet():
    ends = Ends()
    zero, followers = tie(2, ends, raw=(1,))
    followers[1].say(Goodbye())
    followers[1].socket.close()
    followers[2].close()
    zero.close()
    time.sleep(GRACE_SECONDS + 0.3)
    assert ends.said == {}


@pytest.mark.parametrize(
    "greeting",
    [
        lambda stranger: stranger.say(RegisterRank(1, "guess")),
        lambda stranger: stranger.say(Goodbye()),
        lambda stranger: stranger.socket.sendall(b"GET / HTTP/1.1\r\n\r\n"),
        lambda stranger: stranger.socket.shutdown(socket.SHUT_WR),
    ],
    ids=["wrong key", "no hello", "a browser", "nothing"],
)
def test_stranger_is_turned_away_and_the_follower_still_gets_in(greeting):
    ends, server, zero = Ends(), HealthServer(1, KEY), []
    accepting = threading.Thread(target=lambda: zero.append(server.accept_all(5.0, doing(0), ends.of(0))))
    accepting.start()
    stranger = RawFollower(server.port)
    greeting(stranger)
    assert stranger.is_turned_away()
    follower = HealthChannel.connect(
        rank=1, addresses=["127.0.0.1"], port=server.port, key=KEY, timeout=5.0, describe=doing(1), end=ends.of(1)
    )
    accepting.join(PATIENCE)
    follower.fail("still tied")
    ends.wait_for(0)
    assert ends.said[0] == ["still tied"]


def test_strangers_who_say_nothing_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(health_server, "MAX_SILENT", 8)
    ends, server, zero = Ends(), HealthServer(2, KEY), []
    accepting = threading.Thread(target=lambda: zero.append(server.accept_all(30.0, doing(0), ends.of(0))))
    accepting.start()
    strangers = [RawFollower(server.port) for _ in range(20)]
    for stranger in strangers[::2]:
        stranger.socket.sendall(b"\x20\0")
    begin = time.monotonic()
    slow = RawFollower(server.port)
    data = msgspec.msgpack.encode(RegisterRank(1, KEY))
    for byte in len(data).to_bytes(4, "little") + data:
        slow.socket.sendall(bytes([byte]))
    RawFollower(server.port).say(RegisterRank(2, KEY))
    accepting.join(PATIENCE)
    assert zero and time.monotonic() - begin < 3
    assert all(stranger.is_turned_away() for stranger in strangers)
    slow.say(Failure("rank 1 fails"))
    ends.wait_for(0)
    assert ends.said[0] == ["rank 1 fails"]


def test_stranger_without_end_does_not_outlast_the_wait():
    server = HealthServer(1, KEY)
    stranger, begin = RawFollower(server.port), time.monotonic()
    stranger.socket.sendall(b"\x20\0\0\0")
    with pytest.raises(PeerLost, match=r"ranks \[1\]"):
        server.accept_all(0.3, doing(0))
    assert time.monotonic() - begin < 2 and stranger.is_turned_away()


def test_followers_that_never_connect_are_named():
    server = HealthServer(3, KEY)
    follower = RawFollower(server.port)
    follower.say(RegisterRank(2, KEY))
    with pytest.raises(PeerLost, match=r"ranks \[1, 3\]"):
        server.accept_all(0.3, doing(0))


def test_addresses_are_tried_in_turn():
    ends, server, zero = Ends(), HealthServer(1, KEY), []
    accepting = threading.Thread(target=lambda: zero.append(server.accept_all(5.0, doing(0), ends.of(0))))
    accepting.start()
    follower = HealthChannel.connect(
        rank=1,
        addresses=["no-such-host.invalid", "127.0.0.1"],
        port=server.port,
        key=KEY,
        timeout=5.0,
        describe=doing(1),
        end=ends.of(1),
    )
    accepting.join(PATIENCE)
    follower.fail("here")
    ends.wait_for(0)


def test_rank_0_that_cannot_be_reached_is_said_with_its_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(PeerLost, match=f"rank 1 cannot reach rank 0 on port {port}.*127.0.0.1"):
        HealthChannel.connect(rank=1, addresses=["127.0.0.1"], port=port, key=KEY, timeout=1.0, describe=doing(1))
