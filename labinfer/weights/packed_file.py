"""PackedFiles: packed weights of a rank's modules (in the order that kernels read), mapped from the weight cache, or written to it
in the background."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from labinfer.base.errors import UserError
from labinfer.native.cache_file import Damaged, digest, open_own
from labinfer.native.memory import has_huge_pages, huge_bytes, use_huge_pages
from labinfer.observe.progress_line import PLAIN_SECONDS, TransferLine, TransferRate
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.weight_cache import (
    ALIGNMENT,
    PIECE,
    CachedTensor,
    NoRoom,
    WeightCache,
    WeightHeader,
    checkpoint_digest,
    encode_header,
    read_header,
)

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""Minimum size of packed weights to cache, in bytes: less is packed again in no noticeable time."""
LARGE_FRACTION = 0.75
"""Minimum fraction of a mapped file that is in huge pages. If it has less, the file is copied into anonymous huge pages."""
SPOKEN_SECONDS = 1.0
"""Seconds after the end of the run after which a progress line says that the process is still writing the cache."""
CACHING = "caching packed weights for the next start"
"""What progress lines say about the writer."""

State = Mapping[str, Any]
"""State of a module: result of ``WeightedModule.export_packed``."""


@dataclass(frozen=True, kw_only=True)
class PackedFiles:
    """Cache of packed weights for one rank of one model. A *slice digest* (``slices``) identifies the parts of the
    checkpoint that the rank's modules hold."""

    cache: WeightCache
    directory: Path
    """Directory of the model's checkpoint."""
    checkpoint: str
    """Digest of the checkpoint's files before they were read."""
    settings: str
    """Digest of the build and settings that packed weights depend on: version, kernel providers, rounding, quantization
    group size."""
    label: str
    """Human-readable description of the rank's part of the model, and of the dtype and quantization of its weights."""
    options: str
    code: str
    """Digest of the packing code; see ``WeightHeader``."""
    num_threads: int
    """Number of threads that compute checksums."""

    def path(self, slices: str) -> Path:
        """Path of the cache file of modules whose slice digest is ``slices``."""
        return self.cache.path(self.checkpoint, digest(self.code, self.settings, slices))

    def open(self, slices: str, functions: LoadFunctions) -> dict[str, State] | None:
        """States of the modules with the slice digest ``slices``, in memory that is shared by all processes that map
        the file; None if there is no usable file.

        A file that is damaged, holds other weights, or may belong to another user is removed."""
        path = self.path(slices)
        try:
            with open_own(path) as file:
                header, size = read_header(file)
                header.compare(self.checkpoint, self.code, self.settings, slices)
                states = map_states(file, header, size, functions.checksum, self.num_threads)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.info("packed weights cannot be read from %s (%s)", path, error.strerror)
            return None
        except Damaged as error:
            logger.warning("packed weights in %s are ignored (%s); packing again", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # this user may only read the folder
            os.utime(path)
        logger.info("packed weights are mapped from %s", path)
        return states

    def keep(
        self, slices: str, states: dict[str, State], functions: LoadFunctions, least_bytes: int | None = None
    ) -> threading.Thread | None:
        """Write the states of the modules with the slice digest ``slices`` in a thread, which the process joins at
        exit. Returns None if nothing is written.

        Args:
            least_bytes: minimum size of weights to cache; default: ``LEAST_BYTES``.
        """
        least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        if sum(tensor.nbytes for state in states.values() for tensor in _tensors(state)) < least_bytes:
            return None
        thread = threading.Thread(target=self._write, args=(slices, states, functions), name="weight-cache")
        thread.start()
        return thread

    def _write(self, slices: str, states: dict[str, State], functions: LoadFunctions) -> None:
        _give_way()
        path = self.path(slices)
        modules, tensors, size = _place(states)
        try:
            self.cache.make_room(size)
            with self.cache.writing(path) as file:
                if file is None:
                    return
                checksums = []
                with contextlib.closing(_WriteMonitor()) as monitor:
                    for piece in _pieces(tensors, size):
                        checksums.append(functions.checksum(piece))
                        _write_all(file, piece)
                        monitor.look(PIECE * len(checksums), size)
                header = WeightHeader(
                    model=str(self.directory),
                    checkpoint=self.checkpoint,
                    slice=self.label,
                    slices=slices,
                    settings=self.settings,
                    options=self.options,
                    code=self.code,
                    modules=modules,
                    checksums=checksums,
                )
                _write_all(file, torch.frombuffer(bytearray(encode_header(header, size)), dtype=torch.uint8))
                if checkpoint_digest(self.directory) != self.checkpoint:
                    raise NoRoom(f"{self.directory} has changed since they were read")
            self.cache.remove_superseded(path, header)
        except NoRoom as error:
            logger.info("packed weights are not cached for the next start: %s", error)
        except (OSError, UserError) as error:
            logger.info("packed weights could not be cached for the next start: %s", error)
        else:
            logger.info("packed weights are cached for the next start: %.2f GiB in %s", size / 2**30, path)


def map_states(
    file: BinaryIO, header: WeightHeader, size: int, checksum: Callable[[torch.Tensor], int], num_threads: int
) -> dict[str, State]:
    """States of the modules in a cache file, as views into the file, which is mapped read-only.

    If too few pages of the file are huge pages, which have fewer TLB misses, the file is copied into anonymous huge pages.

    Args:
        header, size: see ``read_header``.

    Raises:
        Damaged: a checksum does not match.
        OSError: the file cannot be mapped.
    """
    if size != PIECE * len(header.checksums):
        raise Damaged(f"it has {size} bytes of data and {len(header.checksums)} checksums")
    memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # pages that are not yet in the page cache are read as huge pages
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to weights
        data_B = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(num_threads) as threads:
        for index, total in enumerate(threads.map(checksum, data_B.split(PIECE))):
            if total != header.checksums[index]:
                raise Damaged(f"what begins at byte {index * PIECE} has changed")
    if has_huge_pages() and huge_bytes(data_B.data_ptr()) < LARGE_FRACTION * size:
        mapped_B, data_B = data_B, torch.empty(size, dtype=torch.uint8)
        use_huge_pages(data_B.data_ptr(), size)
        data_B.copy_(mapped_B)

    def value(stored: object) -> object:
        if not isinstance(stored, CachedTensor):
            return stored
        dtype = getattr(torch, stored.dtype)
        end = stored.position + math.prod(stored.shape) * dtype.itemsize
        return data_B[stored.position : end].view(dtype).view(stored.shape)

    return {name: {key: value(stored) for key, stored in module.items()} for name, module in header.modules.items()}


def _tensors(state: State) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _place(states: dict[str, State]) -> tuple[dict[str, dict[str, Any]], list[tuple[int, torch.Tensor]], int]:
    """Header entries of the modules, tensors with their positions in the file, and the total size in bytes."""
    modules: dict[str, dict[str, Any]] = {}
    tensors, end = [], 0
    for name, state in states.items():
        module = modules[name] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                module[key] = value
                continue
            position = -(-end // ALIGNMENT) * ALIGNMENT
            module[key] = CachedTensor(position, str(value.dtype).removeprefix("torch."), list(value.shape))
            tensors.append((position, value))
            end = position + value.nbytes
    return modules, tensors, -(-end // PIECE) * PIECE


def _pieces(tensors: list[tuple[int, torch.Tensor]], size: int) -> Iterator[torch.Tensor]:
    """Yield the data part of a cache file in pieces of ``PIECE`` bytes (uint8), with zeros between tensors. Each piece overwrites
    the memory of the previous one."""
    piece_B, left = torch.empty(PIECE, dtype=torch.uint8), deque(tensors)
    memory = piece_B.numpy()  # NumPy copies without starting threads
    for begin in range(0, size, PIECE):
        memory[:] = 0
        while left and left[0][0] < begin + PIECE:
            position, tensor = left[0]
            source = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            end = position + len(source)
            first, last = max(position, begin), min(end, begin + PIECE)
            memory[first - begin : last - begin] = source[first - position : last - position]
            if end > begin + PIECE:
                break
            left.popleft()
        yield piece_B


def _write_all(file: BinaryIO, bytes_B: torch.Tensor) -> None:
    view = memoryview(bytes_B.numpy())
    while view:
        view = view[file.write(view) :]


def _give_way() -> None:
    """Run the calling thread only while CPU cores are idle (SCHED_IDLE, ``sched(7)``)."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


class _WriteMonitor:
    """Watches the main thread while the writer thread caches weights, and reports the writer's progress: in the log as long as the main
    thread runs, then in a progress line, with a higher priority of the writer."""

    def __init__(self) -> None:
        self._rate, self._seconds = TransferRate(), PLAIN_SECONDS
        self._log_time = time.monotonic() + self._seconds
        self._end: float | None = None
        self._line: TransferLine | None = None

    def look(self, done: int, total: int) -> None:
        """Check whether the main thread has ended, and report progress if a report is due. In the log, the time between two reports
        doubles.

        Args:
            done, total: bytes written, and to be written.
        """
        self._rate.note(done)
        now = time.monotonic()
        if threading.main_thread().is_alive():
            if now >= self._log_time:
                self._seconds *= 2
                self._log_time = now + self._seconds
                logger.info("%s: %s", CACHING, self._rate.describe(done, total))
            return
        if self._end is None:
            self._end = now
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setscheduler(threading.get_native_id(), os.SCHED_OTHER, os.sched_param(0))
        if self._line is None and now - self._end > SPOKEN_SECONDS:
            self._line = TransferLine(CACHING, ending="; Ctrl-C skips this", at_once=True)
        if self._line is not None:
            self._line.show(done, total)

    def close(self) -> None:
        """Clear the progress line."""
        if self._line is not None:
            self._line.close()
