"""LocalCommunicator: ranks are threads of one process. For a group of one, and for tests without a launcher."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from labinfer.comm.communicator import Communicator, Finished, Handle, name_ranks, sum_dtype
from labinfer.comm.progress import Progress


class _Queues:
    """One queue for each (group, sender, receiver), made on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple, queue.Queue] = {}

    def get(self, key: tuple) -> queue.Queue:
        with self._lock:
            return self._queues.setdefault(key, queue.Queue())


class LocalReceive(Handle):
    """Receive from the queue of another thread."""

    def __init__(self, source: queue.Queue, tensor: torch.Tensor, progress: Progress):
        self._queue, self._tensor, self._progress = source, tensor, progress
        self._complete = False

    def done(self) -> bool:
        if not self._complete and not self._queue.empty():
            self._land(self._queue.get())
        return self._complete

    def wait(self, what: str, timeout: float | None = None) -> None:
        if self._complete:
            return
        limit = self._progress.timeout if timeout is None else timeout
        try:
            self._land(self._queue.get(timeout=None if math.isinf(limit) else limit))
        except queue.Empty:
            raise self._progress.timed_out(what, limit) from None

    def _land(self, data: torch.Tensor) -> None:
        self._tensor.copy_(data.view(self._tensor.shape))
        self._complete = True


class LocalCommunicator(Communicator):
    """One rank of a group of threads; ``LocalCommunicator()`` is a group of one."""

    name = "local"

    def __init__(
        self,
        progress: Progress | None = None,
        rank: int = 0,
        size: int = 1,
        queues: _Queues | None = None,
        group: tuple = (),
    ):
        self.rank, self.size = rank, size
        self.progress = progress or Progress()
        self._queues = queues or _Queues()
        self._group = group
        self.members = name_ranks(group[-1] if group else range(size))
        self._num_splits = 0

    @classmethod
    def run(cls, size: int, function: Callable[[LocalCommunicator], object], timeout: float = 60.0) -> list:
        """Call ``function(communicator)`` on ``size`` threads. Returns the results in rank order.

        Raises:
            Exception: the first exception of any thread.
        """
        queues, results, errors = _Queues(), [None] * size, []

        def work(rank: int) -> None:
            try:
                results[rank] = function(cls(Progress(label=f"rank {rank}", timeout=timeout), rank, size, queues))
            except Exception as error:  # noqa: BLE001 - handed to the caller below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(0.05)
        if errors:
            raise errors[0]
        return results

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        self._queues.get((self._group, self.rank, dest)).put(tensor.detach().clone())
        return Finished()

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        return LocalReceive(self._queues.get((self._group, source, self.rank)), tensor, self.progress)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return tensor
        wide = sum_dtype(tensor.dtype)
        return tensor.copy_(torch.stack([part.to(wide) for part in self.all_gather(tensor)]).sum(dim=0))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        for peer in range(self.size):
            if peer != self.rank:
                self.isend(tensor, peer)
        parts = [tensor.clone() if peer == self.rank else torch.empty_like(tensor) for peer in range(self.size)]
        for peer in range(self.size):
            if peer != self.rank:
                self.irecv(parts[peer], peer).wait(f"data from rank {peer}")
        return parts

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        self._num_splits += 1
        mine = next(tuple(group) for group in groups if self.rank in group)
        key = (*self._group, self._num_splits, mine)
        return LocalCommunicator(self.progress, mine.index(self.rank), len(mine), self._queues, key)
