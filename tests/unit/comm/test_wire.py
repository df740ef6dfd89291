"""Structs on the wire, and the control channel that carries them."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch

from labinfer.base.errors import WaitTimeout
from labinfer.comm import wire
from labinfer.comm.communicator import Handle
from labinfer.comm.control import ControlChannel
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.command_senders import command_senders


class Note(msgspec.Struct, tag="note"):
    text: str


class Number(msgspec.Struct, tag="number"):
    value: int


# The wire format.

NOTES = msgspec.msgpack.Decoder(Note)
OVERHEAD = len(msgspec.msgpack.encode(Note("x" * 5000))) - 5000


def unpack(parts: list[torch.Tensor], decoder=NOTES):
    assert wire.rest_size(parts[0]) == (len(parts[1]) if len(parts) > 1 else 0)
    return wire.unpack(parts, decoder)


ROOM = wire.CHUNK - wire.LENGTH_BYTES - OVERHEAD


@pytest.mark.parametrize(
    ("length", "chunks"), [(0, 1), (100, 1), (ROOM - 1, 1), (ROOM, 1), (ROOM + 1, 2), (3_000_000, 2)]
)
def test_messages_of_every_length_come_back(length, chunks):
    parts = wire.pack(Note("é" * (length // 2) + "x" * (length % 2)))
    assert len(parts) == chunks and parts[0].shape == (wire.CHUNK,)
    assert len(unpack(parts).text.encode()) == length


@pytest.mark.parametrize("length", [0, wire.MAX_MESSAGE + 1, 2**32 - 1])
def test_length_that_cannot_be_is_refused_before_it_is_used(length):
    first = wire.pack(Note("hello"))[0]
    first[: wire.LENGTH_BYTES] = torch.tensor(list(length.to_bytes(4, "little")), dtype=torch.uint8)
    with pytest.raises(wire.WireError, match=str(length)):
        wire.rest_size(first)


@pytest.mark.parametrize("off", [-1, 1])
def test_length_that_is_off_does_not_decode(off):
    first = wire.pack(Note("hello"))[0]
    first[0] += off
    with pytest.raises(wire.WireError, match="does not decode"):
        wire.unpack([first], NOTES)


def test_another_type_does_not_decode():
    with pytest.raises(wire.WireError, match="does not decode"):
        unpack(wire.pack(Number(1)))


def test_garbage_does_not_decode():
    first = torch.full((wire.CHUNK,), 0xC1, dtype=torch.uint8)  # a byte that MessagePack never uses
    first[:4] = torch.tensor([9, 0, 0, 0])
    with pytest.raises(wire.WireError):
        wire.unpack([first], NOTES)


# The control channel.


def test_commands_reach_every_rank_in_order_and_reports_come_back_by_rank():
    commands = [Note("one"), Number(2), Note("long" * 5000), Number(4)]

    def work(comm):
        channel = ControlChannel(comm, Note | Number, Number)
        if comm.rank == 0:
            for command in commands:
                channel.broadcast(command)
            reports = channel.collect()
            channel.close()
            return reports
        heard = [channel.receive() for _ in commands]
        channel.reply(Number(10 * comm.rank))
        return heard

    reports, *heard = LocalCommunicator.run(3, work)
    assert heard == [commands, commands]
    assert reports == [Number(10), Number(20)]


COMMANDS = [Note("one"), Number(2), Note("long" * 5000), *(Number(value) for value in range(3, 9)), Note("last")]


@pytest.mark.parametrize("ranks", [range(6), (0, 5, 1, 4, 2), (0, 3)])
def test_forwarded_commands_reach_every_rank_in_order(ranks):
    senders = command_senders(ranks, max_direct=1, fan_out=2)

    def work(comm):
        if comm.rank not in ranks:
            return None
        channel = ControlChannel(comm, Note | Number, Number, senders)
        if comm.rank == 0:
            for command in COMMANDS:
                channel.broadcast(command)
            reports = channel.collect()
            channel.close()
            return reports
        commands = [channel.receive() for _ in COMMANDS]
        channel.reply(Number(10 * comm.rank))
        return commands

    reports, *received = LocalCommunicator.run(6, work)
    assert reports == [Number(10 * rank) for rank in sorted(ranks)[1:]]
    assert received == [COMMANDS if rank in ranks else None for rank in range(1, 6)]


def test_command_is_forwarded_before_it_is_looked_at():
    """So a rank that fails over a command, or works on it for long, keeps it from nobody."""
    senders = command_senders(range(4), max_direct=1, fan_out=1)

    def work(comm):
        if comm.rank == 0:
            return ControlChannel(comm, Note, Number, senders).broadcast(Note("hello"))
        if comm.rank == 3:
            return ControlChannel(comm, Note, Number, senders).receive()
        with pytest.raises(wire.WireError):
            ControlChannel(comm, Number, Number, senders).receive()
        return None

    assert LocalCommunicator.run(4, work)[3] == Note("hello")


class Silent(Handle):
    """A transfer that nobody has begun."""

    def wait(self, what: str, timeout: float | None = None) -> None:
        raise WaitTimeout(what)

    def done(self) -> bool:
        return False


class SilentCommunicator(LocalCommunicator):
    """A group of whose other ranks nothing is heard."""

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        return Silent()


@pytest.mark.parametrize(("rank", "sender"), [(1, 0), (2, 0), (3, 1), (5, 2)])
def test_wait_for_a_forwarded_command_names_who_forwards_it(rank, sender):
    senders = command_senders(range(6), max_direct=1, fan_out=2)
    channel = ControlChannel(SilentCommunicator(rank=rank, size=6), Note, Number, senders)
    with pytest.raises(WaitTimeout, match=f"^the next plan from rank {sender}$"):
        channel.receive()


def test_follower_waits_for_a_command_as_long_as_it_takes():
    def work(comm):
        channel = ControlChannel(comm, Note, Number)
        if comm.rank == 0:
            time.sleep(0.3)
            return channel.broadcast(Note("late"))
        return channel.receive()

    assert LocalCommunicator.run(2, work, timeout=0.05)[1] == Note("late")


def test_missing_report_is_named():
    def work(comm):
        channel = ControlChannel(comm, Note, Number)
        if comm.rank == 0:
            channel.collect()
        elif comm.rank == 1:
            channel.reply(Number(1))

    with pytest.raises(WaitTimeout, match="for the report from rank 2"):
        LocalCommunicator.run(3, work, timeout=0.1)


def test_command_out_of_turn_is_refused():
    def work(comm):
        channel = ControlChannel(comm, Note, Number)
        return channel.broadcast(Number(1)) if comm.rank == 0 else channel.receive()

    with pytest.raises(wire.WireError):
        LocalCommunicator.run(2, work)


def test_lone_rank_talks_to_nobody():
    channel = ControlChannel(LocalCommunicator(), Note, Number)
    channel.broadcast(Note("anybody?"))
    assert channel.collect() == []
    channel.close()
