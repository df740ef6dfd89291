"""The limit on the address space of a process, ``ulimit -v`` (RLIMIT_AS in ``getrlimit(2)``), and the errors that come of it."""

from __future__ import annotations

import math
import resource
from pathlib import Path

from labinfer.base.errors import UserError

LEAST_BYTES = 768 << 20
"""Address space below which no process gets through importing torch: libraries end it there in ways that Python does not notice."""
SYMPTOMS = (
    "failed to map segment",  # the dynamic linker, of a library
    "can't start new thread",
    "can't allocate memory",  # torch
    "annot allocate memory",  # the system, as ENOMEM
    "bad_alloc",
)
"""Parts of messages of errors that a process gets that may map no more memory."""


def address_space_limit() -> float:
    """Bytes that this process may map; infinity without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def address_space_left() -> float:
    """Bytes that this process may map beside those it has mapped; infinity without a limit."""
    limit = address_space_limit()
    if limit == math.inf:
        return limit
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - mapped_pages * resource.getpagesize())


def describe_limit() -> str:
    """The limit with its value and what to do, as part of a sentence; empty without a limit."""
    limit = address_space_limit()
    if limit == math.inf:
        return ""
    return (
        f"ulimit -v (RLIMIT_AS) allows {limit >> 10} KiB ({limit / 2**30:.1f} GiB) of address space to a process; say ulimit -v "
        "unlimited, or raise LimitAS (systemd)"
    )


def check_address_space() -> None:
    """Refuse a limit that is too small for torch itself.

    Raises:
        UserError: it is.
    """
    if address_space_limit() < LEAST_BYTES:
        raise UserError(f"torch needs {LEAST_BYTES >> 10} KiB of address space at least: {describe_limit()}")


def explain_by_limit(error: BaseException | None) -> str:
    """A line for an error that comes of the limit, as far as its text and its causes tell; empty for any other error."""
    if not (limit := describe_limit()):
        return ""
    while error is not None:
        if isinstance(error, MemoryError) or any(symptom in str(error) for symptom in SYMPTOMS):
            return f"there is no address space left: {limit}"
        error = error.__cause__ or error.__context__
    return ""
