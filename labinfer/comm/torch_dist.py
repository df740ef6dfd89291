"""TorchCommunicator: torch.distributed, for torchrun and plain Slurm; gloo on CPUs, the vendor's library on accelerators.

gloo sleeps while it waits, so an idle rank uses no CPU time. It cannot report whether a transfer is complete, and a timed-out wait
breaks the connection: a wait here either completes or ends the run.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from labinfer.base.errors import PeerLost, UserError, first_line
from labinfer.comm.communicator import Communicator, Handle, name_ranks, sum_dtype
from labinfer.comm.progress import Progress
from labinfer.comm.rendezvous import fresh_namespace

CPU, GLOO = torch.device("cpu"), "gloo"
FOREVER = datetime.timedelta(days=365)
EXCHANGE_LIMIT = 128 * 1024
"""Bytes up to which all ranks exchange whole tensors and sum locally, which is faster than gloo's all-reduce
(``docs/decisions/0004``)."""


class TorchHandle(Handle):
    """Transfer of torch.distributed. ``done`` is true only after ``wait``, as gloo cannot report completion."""

    def __init__(self, work: dist.Work, buffer: torch.Tensor, progress: Progress, landing: torch.Tensor | None = None):
        self._work = work
        self._buffer = buffer
        self._landing = landing
        self._progress = progress
        self._complete = False

    def done(self) -> bool:
        return self._complete

    def wait(self, what: str, timeout: float | None = None) -> None:
        if self._complete:
            return
        limit = self._progress.timeout if timeout is None else timeout
        with self._progress.waiting(what):
            try:
                self._work.wait(FOREVER if math.isinf(limit) else datetime.timedelta(seconds=limit))
            except RuntimeError as error:
                raise _translated(error, self._progress, what, limit) from None
        if self._landing is not None:
            self._landing.copy_(self._buffer)
        self._complete = True


class TorchCommunicator(Communicator):
    """torch.distributed group. Tensors on devices that the backend cannot access are copied to ``device`` first.

    Args:
        backend: torch.distributed's name of the backend.
        device: device of this rank that the backend sends from; the CPU for gloo.
    """

    def __init__(self, progress: Progress, group: dist.ProcessGroup, backend: str, device: torch.device):
        self._group = group
        self._device = device
        self.name = backend
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.progress = progress
        self.members = name_ranks(dist.get_process_group_ranks(group))

    @classmethod
    def join(
        cls,
        progress: Progress,
        address: str,
        rank: int,
        world_size: int,
        *,
        place: str = "",
        own_addresses: Sequence[str] | None = None,
        choose_interface: Callable[[list[list[str]]], str] = lambda peers: "",
    ) -> TorchCommunicator:
        """Form the world group over gloo.

        Args:
            address: rendezvous address: ``env://`` under torchrun, whose agent hosts a store; otherwise ``tcp://host:port`` of rank 0, which
                hosts one.
            place: host and port of ``address`` for errors, if ``address`` does not name them.
            own_addresses: addresses of this machine; None if all ranks are on one machine.
            choose_interface: takes the addresses of all ranks, binds gloo to a reachable interface, and returns a text that describes it.

        Raises:
            UserError: the ranks do not meet within the timeout.
        """
        # Further groups of this process share the first one's world, whose keys stay in the store.
        if not dist.is_initialized():
            timeout = datetime.timedelta(seconds=progress.timeout)
            tried = "" if own_addresses is None else " (a firewall may block that port)"
            try:
                store, rank, world_size = next(dist.rendezvous(address, rank, world_size, timeout=timeout))
                store.set_timeout(timeout)
                store = fresh_namespace(store, rank, world_size, progress.timeout)
                if own_addresses is not None:
                    store.set(f"addresses/{rank}", " ".join(own_addresses))
                    peers = [store.get(f"addresses/{peer}").decode().split() for peer in range(world_size)]
                    tried = f" ({choose_interface(peers)}; GLOO_SOCKET_IFNAME chooses another interface)"
                dist.init_process_group(GLOO, store=store, rank=rank, world_size=world_size, timeout=timeout)
            except (RuntimeError, dist.DistError) as error:
                if "EADDRINUSE" in str(error):
                    tried = "; another program uses that port: set MASTER_PORT to a free one"
                raise UserError(
                    f"rank {rank} could not connect to the other {world_size - 1} ranks at {place or address}: "
                    f"{first_line(error):.200}{tried}"
                ) from None
        return cls(progress, dist.group.WORLD, GLOO, CPU)

    def memory(self, peer: int) -> str:
        return self._device.type

    def _reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` if the backend can access its memory, otherwise a copy on the backend's device."""
        return tensor if tensor.device.type == self._device.type else tensor.to(self._device)

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        buffer = self._reachable(tensor)
        try:
            return TorchHandle(dist.isend(buffer, group=self._group, group_dst=dest), buffer, self.progress)
        except RuntimeError as error:
            raise _translated(error, self.progress, f"room at rank {dest}", 0) from None

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        buffer = tensor
        if tensor.device.type != self._device.type:
            buffer = torch.empty_like(tensor, device=self._device)
        landing = None if buffer is tensor else tensor
        try:
            return TorchHandle(dist.irecv(buffer, group=self._group, group_src=source), buffer, self.progress, landing)
        except RuntimeError as error:
            raise _translated(error, self.progress, f"data from rank {source}", 0) from None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return tensor
        wide = sum_dtype(tensor.dtype)
        if self.name != "gloo" and self.size > 2 and tensor.dtype != wide:  # two tensors are rounded once anyway
            return tensor.copy_(self.all_reduce(tensor.to(wide)))
        if self.name == GLOO and (tensor.device.type != "cpu" or tensor.dtype != wide or not tensor.is_contiguous()):
            return tensor.copy_(self.all_reduce(tensor.to("cpu", wide).contiguous()))
        what = f"the sum over {self.members}"
        if self.name == GLOO and tensor.nbytes * (self.size - 1) <= EXCHANGE_LIMIT:
            return tensor.copy_(self._exchange(tensor, what).sum(dim=0))
        self._run(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), tensor, what)
        return tensor

    def _exchange(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Tensors of all ranks, stacked in rank order, so that every rank sums in this order."""
        parts = tensor.new_empty((self.size, *tensor.shape))
        parts[self.rank].copy_(tensor)
        peers = [r for r in range(self.size) if r != self.rank]
        receives = [self.irecv(parts[r], r) for r in peers]
        sends = [self.isend(parts[self.rank], r) for r in peers]
        for handle in receives + sends:
            handle.wait(what)
        return parts

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        source = self._reachable(tensor).contiguous()
        if self.name == GLOO:
            gathered = self._exchange(source, f"data from {self.members}")
        else:
            gathered = source.new_empty((self.size, *source.shape))
            flat, own = gathered.view(-1), source.view(-1)  # some backends refuse a stack as the target
            self._run(
                lambda: dist.all_gather_into_tensor(flat, own, group=self._group, async_op=True),
                gathered,
                f"data from {self.members}",
            )
        return list(gathered.to(tensor.device))

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        timeout = datetime.timedelta(seconds=self.progress.timeout)
        world = dist.get_process_group_ranks(self._group)
        mine = None
        for index, ranks in enumerate(groups):  # every rank of the launch takes part in making every group
            backend = (backends[index] if backends else "") or GLOO
            made = dist.new_group([world[r] for r in ranks], backend=backend, timeout=timeout)
            if self.rank in ranks:
                device = CPU if backend == GLOO else _current_accelerator()
                mine = TorchCommunicator(self.progress, made, backend, device)
        return mine

    def close(self) -> None:
        if self._group is not dist.group.WORLD:  # later groups of this process are split from it
            dist.destroy_process_group(self._group)

    def _run(self, begin, buffer: torch.Tensor, what: str) -> None:
        try:
            work = begin()
        except RuntimeError as error:
            raise _translated(error, self.progress, what, 0) from None
        TorchHandle(work, buffer, self.progress).wait(what)


def registered_backend(device_type: str) -> str:
    """Backend between devices of a type, as registered with torch; empty if this rank's torch has none, or does not know the type."""
    try:
        return dist.get_default_backend_for_device(device_type)
    except (RuntimeError, ValueError):
        return ""


def _current_accelerator() -> torch.device:
    """This rank's accelerator; see ``use_device``."""
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def _translated(error: RuntimeError, progress: Progress, what: str, limit: float) -> Exception:
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return progress.timed_out(what, limit)
    return PeerLost(f"{progress.label} lost its peer while waiting for {what}: {first_line(error):.200}")
