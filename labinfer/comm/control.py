"""ControlChannel: broadcast of rank 0's commands to all other ranks, and their replies.

It has its own communicator, so that commands never queue behind activations. In large groups ranks forward commands to others
(a tree). Replies go to rank 0 directly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from labinfer.comm import wire
from labinfer.comm.communicator import Communicator
from labinfer.comm.send_queue import MAX_SENDS, SendQueue

MAX_BEHIND = 128
"""Maximum number of pending sends per receiver. A rank receives a command only after its previous step, which in stage s runs
s steps later than on rank 0."""


class ControlChannel:
    """Commands from rank 0 to all followers (the other ranks), and their replies.

    Args:
        comm: communicator used for nothing else.
        command_type: struct, or tagged union of structs, of the commands.
        reply_type: struct of the replies.
        senders: follower → rank that sends it the commands; None sends from rank 0 to all of ``comm``.
    """

    def __init__(
        self, comm: Communicator, command_type: Any, reply_type: Any, senders: Mapping[int, int] | None = None
    ):
        senders = dict.fromkeys(range(1, comm.size), 0) if senders is None else senders
        self._comm = comm
        self._followers = sorted(senders)
        self._sender = senders.get(comm.rank, 0)
        self._receivers = [rank for rank, sender in senders.items() if sender == comm.rank]
        self._commands = msgspec.msgpack.Decoder(command_type)
        self._replies = msgspec.msgpack.Decoder(reply_type)
        self._sends = SendQueue(max(MAX_SENDS, MAX_BEHIND * len(self._receivers)))

    def broadcast(self, command: msgspec.Struct) -> None:
        """Rank 0: send a command to every follower asynchronously."""
        if self._receivers:
            self._send(wire.pack(command))

    def receive(self, what: str = "the next plan") -> Any:
        """Followers: wait for rank 0's next command, and start to forward it before deserializing it.

        Args:
            what: name of the command in errors.
        """
        parts = self._receive(self._sender, f"{what} from rank {self._sender}", math.inf)
        self._send(parts)
        return wire.unpack(parts, self._commands)

    def reply(self, reply: msgspec.Struct, what: str = "a report", timeout: float | None = None) -> None:
        """Followers: send a reply to rank 0. Waits until rank 0 has it, and the commands that this rank forwards to other ranks are sent.

        Args:
            what: name of the reply in errors.
            timeout: seconds until rank 0 must receive the reply; None for the group's timeout.
        """
        self._sends.drain()
        for part in wire.pack(reply):
            self._comm.isend(part, 0).wait(f"rank 0 to receive {what}", timeout)

    def collect(self, what: str = "the report") -> list:
        """Rank 0: wait for one reply of every follower. Returns the replies in rank order."""
        self._sends.drain()
        return [
            wire.unpack(self._receive(source, f"{what} from rank {source}"), self._replies)
            for source in self._followers
        ]

    def _send(self, parts: list[torch.Tensor]) -> None:
        for part in parts:
            for dest in self._receivers:
                self._sends.keep(self._comm.isend(part, dest), f"rank {dest} to receive a command")

    def _receive(self, source: int, what: str, timeout: float | None = None) -> list[torch.Tensor]:
        """Receive one message from ``source``, as the tensors in which the message was sent."""
        first = torch.empty(wire.CHUNK, dtype=torch.uint8)
        self._comm.irecv(first, source).wait(what, timeout)
        parts = [first]
        if size := wire.rest_size(first):
            parts.append(torch.empty(size, dtype=torch.uint8))
            self._comm.irecv(parts[1], source).wait(what)
        return parts

    def close(self) -> None:
        """Wait until every send is complete."""
        self._sends.drain()
