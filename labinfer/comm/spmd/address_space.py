"""Address-space limit of a process, ``ulimit -v`` (RLIMIT_AS in ``getrlimit(2)``), and explanations of errors that it causes."""

from __future__ import annotations

import math
import resource
from pathlib import Path

from labinfer.base.errors import UserError

LEAST_BYTES = 768 << 20
"""Minimum address space for importing torch: below it, libraries kill the process in ways that Python does not notice."""
OUT_OF_MEMORY_MESSAGES = (
    "failed to map segment",  # from the dynamic linker
    "can't start new thread",
    "can't allocate memory",  # from torch
    "annot allocate memory",  # from the system (ENOMEM)
    "bad_alloc",
)
"""Substrings of error messages that a process gets when it can map no more memory."""


def address_space_limit() -> float:
    """Address-space limit of this process in bytes; infinity without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def address_space_left() -> float:
    """Bytes that this process can still map; infinity without a limit."""
    limit = address_space_limit()
    if limit == math.inf:
        return limit
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - mapped_pages * resource.getpagesize())


def describe_limit() -> str:
    """Value of the address-space limit and advice, as part of a sentence; empty without a limit."""
    limit = address_space_limit()
    if limit == math.inf:
        return ""
    return (
        f"ulimit -v (RLIMIT_AS) allows {limit >> 10} KiB ({limit / 2**30:.1f} GiB) of address space per process; "
        "run ulimit -v unlimited, or raise LimitAS (systemd)"
    )


def check_address_space() -> None:
    """Refuse an address-space limit that is too small for importing torch.

    Raises:
        UserError: the limit is below ``LEAST_BYTES``.
    """
    if address_space_limit() < LEAST_BYTES:
        raise UserError(f"torch needs at least {LEAST_BYTES >> 10} KiB of address space: {describe_limit()}")


def explain_by_limit(error: BaseException | None) -> str:
    """Message for an error that the address-space limit caused, judging by its text and causes; empty for other errors."""
    if not (limit := describe_limit()):
        return ""
    while error is not None:
        if isinstance(error, MemoryError) or any(symptom in str(error) for symptom in OUT_OF_MEMORY_MESSAGES):
            return f"out of address space: {limit}"
        error = error.__cause__ or error.__context__
    return ""
