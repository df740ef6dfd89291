"""Read-ahead: reads weights (a checkpoint, or its packed weights) into the page cache while Python still imports torch.

``sendfile(2)`` to ``/dev/null`` reads pages into the cache without copying them, and without the GIL. ``posix_fadvise`` would read
only the read-ahead window of a file.
"""

from __future__ import annotations

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

PIECE = 256 << 20
"""Bytes that one call of ``sendfile`` reads; the kernel accepts at most 2 GiB."""
MEMORY_FRACTION = 0.5
"""Largest checkpoint that is read ahead, as a fraction of the machine's memory: a larger one would evict its own beginning from the
page cache."""


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
    total, memory = sum(sizes), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > MEMORY_FRACTION * memory:
        return 0
    begin, end = total * part // num_parts, total * (part + 1) // num_parts
    num_read = first = 0
    with open(os.devnull, "wb") as sink:
        for path, size in zip(files, sizes, strict=True):
            position, stop = max(0, begin - first), min(size, end - first)
            first += size
            with open(path, "rb") as file:
                while position < stop:
                    sent = os.sendfile(sink.fileno(), file.fileno(), position, min(PIECE, stop - position))
                    if not sent:  # the file has been truncated
                        break
                    position += sent
                    num_read += sent
    return num_read
