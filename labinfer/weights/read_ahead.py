"""Read-ahead: reads weights (a checkpoint, or its packed weights) into the page cache while Python still imports torch, or while
they are loaded.

``sendfile(2)`` to ``/dev/null`` reads pages into the cache without copying them, and without the GIL. ``posix_fadvise`` would read
only the read-ahead window of a file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path

from labinfer.base.config import DEFAULT_HUB
from labinfer.base.errors import UserError
from labinfer.native.cache_file import Damaged, open_own
from labinfer.native.memory import read_mapped
from labinfer.weights.model_files import open_model
from labinfer.weights.resolve import resolve_model
from labinfer.weights.weight_cache import WeightCache, checkpoint_digest

Span = tuple[Path, int, int]
"""File, offset and size in bytes of a tensor."""
PIECE = 256 << 20
"""Bytes that one call of ``sendfile`` reads; the kernel accepts at most 2 GiB."""
MEMORY_FRACTION = 0.5
"""Largest checkpoint that is read ahead as a whole, as a fraction of the machine's memory: a larger one would evict its own beginning
from the page cache."""
WINDOW = 1 << 30
"""Maximum distance in bytes of ``PacedReadAhead`` from the loader."""


def start_reading_ahead(
    model: str,
    model_dir: str,
    part: int,
    num_parts: int,
    *,
    hub: str = DEFAULT_HUB,
    cache: WeightCache | None = None,
    options: str = "",
) -> threading.Thread:
    """Read one of ``num_parts`` equal parts of a model's files in a thread. Errors are ignored, as the loader will meet and raise
    them.

    Args:
        model, model_dir, hub: see ``resolve_model``.
        cache: cache of packed weights; they are read instead of the checkpoint if a launch with ``options`` has written them.
        options: digest of the launch's options; see ``WeightHeader``.
    """

    def read() -> None:
        try:
            directory = resolve_model(model, model_dir, may_download=False, hub=hub)
            packed = cache.written_with(checkpoint_digest(directory), options) if cache is not None else []
            for path in packed[part::num_parts]:
                with open_own(path) as file:
                    read_mapped(file) or read_part([path], 0, 1)
            if not packed:
                read_part(open_model(directory).weight_files(), part, num_parts)
        except (UserError, OSError, Damaged):
            pass

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    return thread


def read_part(files: list[Path], part: int, num_parts: int) -> int:
    """Read part ``part`` of ``num_parts`` of the concatenation of ``files`` into the page cache.

    Returns:
        Bytes read.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    if exceeds_page_cache(total):
        return 0
    begin, end = total * part // num_parts, total * (part + 1) // num_parts
    num_read = first = 0
    for path, size in zip(files, sizes, strict=True):
        num_read += read_span(path, max(0, begin - first), min(size, end - first))
        first += size
    return num_read


def exceeds_page_cache(num_bytes: int) -> bool:
    """Whether a checkpoint of ``num_bytes`` is too large to be read ahead as a whole."""
    return num_bytes > MEMORY_FRACTION * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_span(path: Path, position: int, stop: int) -> int:
    """Read the bytes ``position`` to ``stop`` of a file into the page cache.

    Returns:
        Bytes read.

    Raises:
        OSError: the file cannot be read.
    """
    begin = position
    with open(path, "rb") as file, open(os.devnull, "wb") as sink:
        while position < stop:
            sent = os.sendfile(sink.fileno(), file.fileno(), position, min(PIECE, stop - position))
            if not sent:  # the file has been truncated
                break
            position += sent
    return max(0, position - begin)


class PacedReadAhead:
    """Reads a checkpoint that is too large for the page cache in the order of loading, in a thread that stays ahead of the loader by
    ``WINDOW`` bytes at most. Errors are ignored, as the loader will meet and raise them.

    Args:
        slices: slices in the order of loading: bytes of the slice in memory, and the file, offset and size of each of its tensors.
        drops: whether tensors are dropped from the page cache after loading; only if no other rank of the host loads them.
    """

    def __init__(self, slices: list[tuple[int, list[Span]]], drops: bool):
        ends = itertools.accumulate(size for size, _ in slices)
        self._slices = [(end - size, spans) for end, (size, spans) in zip(ends, slices, strict=True)]
        self._last_use = {
            span: begin + size for (begin, spans), (size, _) in zip(self._slices, slices, strict=True) for span in spans
        }
        self._drops = drops
        self._done, self._moved, self._is_closed = 0, threading.Condition(), False
        self._thread: threading.Thread | None = None

    def advance(self, done: int) -> None:
        """Note that the slices in the first ``done`` bytes of memory are loaded. The first call starts the thread."""
        with self._moved:
            self._done = done
            self._moved.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        with self._moved:
            self._is_closed = True
            self._moved.notify()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        left = dict(self._last_use)  # tensors to be read, each with the bytes loaded after its last use
        cached: dict[Span, int] = {}
        for begin, spans in self._slices:
            with self._moved:
                self._moved.wait_for(lambda limit=begin - WINDOW: self._is_closed or self._done >= limit)
                done = self._done
            if self._is_closed:
                return
            for span in [span for span, end in cached.items() if end <= done and self._drops]:
                del cached[span]
                drop_span(*span)
            for path, position, num_bytes in left.keys() & spans:
                cached[path, position, num_bytes] = left.pop((path, position, num_bytes))
                with contextlib.suppress(OSError):
                    read_span(path, position, position + num_bytes)


def drop_span(path: Path, position: int, num_bytes: int) -> None:
    """Drop the pages of part of a file from the page cache, if the system allows it."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), position, num_bytes, os.POSIX_FADV_DONTNEED)
