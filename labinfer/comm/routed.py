"""RoutedCommunicator: messages between accelerators of one type over the library of these accelerators, all other messages through host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labinfer.comm.communicator import Communicator, Handle


class RoutedCommunicator(Communicator):
    """Communicator of a rank whose accelerator reaches those of some ranks directly. Only messages are routed; collectives use ``host``.

    Args:
        host: communicator of all ranks, in host memory.
        direct: communicator between the accelerators of this rank and of its direct peers.
        ranks: ranks of ``direct``, in its order, as numbered in ``host``.
    """

    def __init__(self, host: Communicator, direct: Communicator, ranks: Sequence[int]):
        self._host, self._direct = host, direct
        self._direct_ranks = {rank: number for number, rank in enumerate(ranks)}
        self.rank, self.size, self.members = host.rank, host.size, host.members
        self.name, self.progress = direct.name, host.progress
        self.polls = host.polls or direct.polls

    def memory(self, peer: int) -> str:
        comm, number = self._route(peer)
        return comm.memory(number)

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        comm, number = self._route(dest)
        return comm.isend(tensor, number)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        comm, number = self._route(source)
        return comm.irecv(tensor, number)

    def isend_after(self, header: bytes, tensor: torch.Tensor, dests: Sequence[int]) -> list[Handle]:
        sends: dict[int, Handle] = {}
        for comm in (self._host, self._direct):
            routes = {dest: number for dest in dests for user, number in [self._route(dest)] if user is comm}
            if routes:
                sends |= zip(routes, comm.isend_after(header, tensor, list(routes.values())), strict=True)
        return [sends[dest] for dest in dests]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._host.all_gather(tensor)

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        return self._host.split(groups, backends)

    def advance(self) -> None:
        self._host.advance()
        self._direct.advance()

    def _route(self, rank: int) -> tuple[Communicator, int]:
        """Communicator that reaches a rank, and the rank's number in it."""
        number = self._direct_ranks.get(rank)
        return (self._host, rank) if number is None else (self._direct, number)
