"""The control channel: rank 0 tells every rank what to do next, and gathers what they report.

Over its own communicator, so that commands never queue up behind activations.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from labinfer.comm import wire
from labinfer.comm.communicator import Communicator
from labinfer.comm.send_queue import SendQueue


class ControlChannel:
    """Commands from rank 0 to all others, reports from them to rank 0.

    Args:
        comm: a communicator used for nothing else.
        command_type: the (tagged union of) struct that commands decode to.
        report_type: the struct that reports decode to.
    """

    def __init__(self, comm: Communicator, command_type: Any, report_type: Any):
        self._comm = comm
        self._commands = msgspec.msgpack.Decoder(command_type)
        self._reports = msgspec.msgpack.Decoder(report_type)
        self._sends = SendQueue()

    def broadcast(self, command: msgspec.Struct) -> None:
        """Rank 0: begin to send a command to every other rank; does not wait for them."""
        if self._comm.size == 1:
            return
        for part in wire.pack(command):
            for dest in range(1, self._comm.size):
                self._sends.keep(self._comm.isend(part, dest), f"rank {dest} to take a command")

    def receive(self) -> Any:
        """Followers: sleep until rank 0's next command."""
        return self._receive(0, self._commands, "the next plan from rank 0", math.inf)

    def report(self, report: msgspec.Struct) -> None:
        """Followers: send a report to rank 0."""
        for part in wire.pack(report):
            self._comm.isend(part, 0).wait("rank 0 to take a report")

    def collect(self) -> list:
        """Rank 0: one report of every other rank, in rank order."""
        self._sends.drain()
        return [
            self._receive(source, self._reports, f"the report of rank {source}", None)
            for source in range(1, self._comm.size)
        ]

    def _receive(self, source: int, decoder: msgspec.msgpack.Decoder, what: str, timeout: float | None) -> Any:
        first = torch.empty(wire.CHUNK, dtype=torch.uint8)
        self._comm.irecv(first, source).wait(what, timeout)
        rest = None
        if size := wire.rest_size(first):
            rest = torch.empty(size, dtype=torch.uint8)
            self._comm.irecv(rest, source).wait(what)
        return wire.unpack(first, rest, decoder)

    def close(self) -> None:
        """Let commands on their way arrive."""
        self._sends.drain()
