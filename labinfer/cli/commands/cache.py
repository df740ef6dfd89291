"""``launch.py cache``: lists or removes packed weights that are cached on disk. Does not import torch."""

from __future__ import annotations

import time

from labinfer.base.config import CacheOptions, WeightCacheOptions
from labinfer.base.errors import ExitStatus, UserError
from labinfer.observe.output_file import STANDARD, OutputFile
from labinfer.observe.table import format_bytes, format_table
from labinfer.weights.weight_cache import WeightCache, try_header

HEADER = ("model", "holds", "size", "last used")
UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def run(own: WeightCacheOptions) -> int:
    """Print a table of the cached files, or remove them.

    Raises:
        UserError: there is no cache folder, or a file cannot be removed.
    """
    cache = WeightCache.from_home(CacheOptions.weight_cache_size)
    if cache is None:
        raise UserError("the weight cache is disabled: this user has no home directory")
    if own.clean:
        try:
            text = f"{format_bytes(cache.clean())} deleted from {cache.folder}"
        except OSError as error:
            raise UserError(f"{error.filename} cannot be deleted ({error.strerror})") from None
    else:
        text = _describe(cache, time.time())
    OutputFile(STANDARD).write(text + "\n")
    return ExitStatus.OK


def _describe(cache: WeightCache, now: float) -> str:
    files = cache.files()
    if not files:
        return f"no packed weights in {cache.folder}"
    rows = []
    for file in files:
        header = try_header(file.path)
        whose = (
            (header.model, header.slice) if header is not None else (file.path.name, "damaged, or of another version")
        )
        rows.append((*whose, format_bytes(file.size), _age(now - file.last_use)))
    total = format_bytes(sum(file.size for file in files))
    return f"{format_table(HEADER, rows)}\n\n{total} in {cache.folder}; --clean deletes them"


def _age(seconds: float) -> str:
    """Text for an age of ``seconds``, such as "3 days"."""
    for unit, name in UNITS:
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"
