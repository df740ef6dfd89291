"""The cards' own process group, as NCCL and HCCL are: it moves data from card to card, and refuses two ranks on one card."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .cards import Cards


class CardGroup(dist.ProcessGroup):
    """Runs gloo on the bytes of the cards' tensors.

    As with NCCL, the ranks meet when they send first, on the card of what they send, and no copy to the host is counted.
    """

    def __init__(self, name: str, cards: Cards, store: dist.Store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self._name, self._cards, self._store, self._timeout = name, cards, store, timeout
        self._gloo: dist.ProcessGroupGloo | None = None
        self._cards_met: dict[int, str] = {}
        self._group_name = ""

    def getBackendName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def allreduce(self, tensors, opts=None):
        self._meet(tensors, range(self.size()))
        return self._begin("allreduce", [self._bytes(tensors)], opts)

    def _allgather_base(self, output, tensor, opts=None):
        self._meet([tensor], range(self.size()))
        return self._begin("_allgather_base", [*self._bytes([output]), *self._bytes([tensor])], opts)

    all_gather_single = _allgather_base  # the name from torch 2.13 on

    def send(self, tensors, dest, tag=0):
        self._meet(tensors, [self.rank(), dest])
        return self._gloo.send(self._bytes(tensors), dest, tag)

    def recv(self, tensors, source, tag=0):
        self._meet(tensors, [self.rank(), source])
        return self._gloo.recv(self._bytes(tensors), source, tag)

    def shutdown(self) -> None:
        self._gloo = None

    def abort(self) -> None:
        self._gloo = None

    def _begin(self, method: str, arguments: list, opts):
        call = getattr(self._gloo, method)
        return call(*arguments) if opts is None else call(*arguments, opts)

    def _bytes(self, tensors) -> list[torch.Tensor]:
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise RuntimeError(f"{self._name}: tensors must be contiguous")
        return [torch.ops.fake_device.host_view(tensor) for tensor in tensors]

    def _meet(self, tensors, ranks) -> None:
        """Agree with ``ranks`` that each has a card of its own."""
        for tensor in tensors:
            if tensor.device.type != self._cards.name:
                raise RuntimeError(f"{self._name}: no backend for a tensor on {tensor.device}")
        if self._gloo is None:
            own = self._cards.identity(tensors[0].device.index)
            self._cards_met[self.rank()] = own
            self._store.set(f"card/{self.rank()}", own)
            self._gloo = dist.ProcessGroupGloo(self._store, self.rank(), self.size(), timeout=self._timeout)
        for rank in ranks:
            if rank not in self._cards_met:
                self._cards_met[rank] = self._store.get(f"card/{rank}").decode()
        used = [self._cards_met[rank] for rank in ranks]
        if len(set(used)) < len(used):
            raise RuntimeError(f"{self._name}: duplicate device: ranks {list(ranks)} are on {used}")
