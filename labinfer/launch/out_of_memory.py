"""memory_for: reports an out-of-memory error as a UserError with advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labinfer.base.errors import UserError, first_line
from labinfer.comm.spmd.address_space import describe_limit


@contextmanager
def memory_for(what: str, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a UserError, which says that ``device`` has no room for ``what``.

    Raises:
        UserError: the memory is exhausted.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        reason = first_line(error)
        if type(error) is RuntimeError and "alloc" not in reason:
            raise
        hint = describe_limit() or "use more ranks, a smaller --dtype or a smaller --memory-utilization"
        raise UserError(f"no room for {what} on {device} ({reason:.120}); {hint}") from None
