"""memory_for: running out of memory, as a refusal with advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labinfer.base.errors import UserError, first_line
from labinfer.comm.spmd.address_space import describe_limit


@contextmanager
def memory_for(what: str, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into a refusal; torch reports a CPU's as a plain RuntimeError.

    Raises:
        UserError: there is no room.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        reason = first_line(error)
        if type(error) is RuntimeError and "alloc" not in reason:
            raise
        hint = describe_limit() or "use more ranks, a smaller --dtype or a smaller --memory-utilization"
        raise UserError(f"{what} do not fit on {device} ({reason:.120}); {hint}") from None
