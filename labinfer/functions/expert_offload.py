"""``ExpertOffload``: a rank's experts in a file, as far as they have no room in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from labinfer.base.errors import UserError
from labinfer.functions.functions import Functions


@dataclass
class ExpertStats:
    """Counters of the experts that were asked for. Times in seconds."""

    hits: int = 0
    """Experts that were in memory."""
    misses: int = 0
    bytes_read: int = 0
    stall_time: float = 0.0
    """Time in which nothing could be computed for want of an expert."""


class ExpertOffload(Protocol):
    """The file, and memory for those that were used last."""

    @property
    def stats(self) -> ExpertStats: ...

    def reset_stats(self) -> None:
        """Count from 0 again."""

    def offload(self, functions: Functions) -> Functions:
        """The same functions with all experts in here."""


def needs_compiled_experts() -> UserError:
    """The error of ``--expert-offload`` where experts are not the compiled ones."""
    return UserError(
        "--expert-offload needs the compiled experts, and these are torch's: it is for CPUs, with a C++ compiler and "
        "without --functions reference"
    )
