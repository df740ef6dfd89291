"""set_up_logging: logging to standard error."""

from __future__ import annotations

import logging

from labinfer.base.standard_error import StandardErrorHandler


def set_up_logging(rank: int, level: str) -> None:
    """Log to standard error: rank 0 all messages of ``level`` and above, other ranks only warnings."""
    handler = StandardErrorHandler()
    handler.setFormatter(
        logging.Formatter("labinfer: %(message)s" if rank == 0 else f"labinfer: rank {rank}: %(message)s")
    )
    package = logging.getLogger("labinfer")
    package.handlers[:] = [handler]
    package.setLevel(level.upper() if rank == 0 else logging.WARNING)
    package.propagate = False
