"""``ExpertOffload``: offload of a rank's experts to a file, with recently used ones cached in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from labinfer.base.errors import UserError
from labinfer.functions.functions import Functions


@dataclass
class ExpertStats:
    """Counters of expert accesses. Times in seconds."""

    hits: int = 0
    """Accesses to experts that were in memory."""
    misses: int = 0
    bytes_read: int = 0
    stall_time: float = 0.0
    """Time during which computation waited for an expert to be read."""


class ExpertOffload(Protocol):
    """A file with all experts of a rank, and a cache in memory of the most recently used ones."""

    @property
    def stats(self) -> ExpertStats: ...

    def reset_stats(self) -> None:
        """Reset the statistics of cache hits and reads to 0."""

    def offload(self, functions: Functions) -> Functions:
        """Copy of ``functions`` whose ``make_experts`` keeps all experts in the file."""


def needs_compiled_experts() -> UserError:
    """Error of ``--expert-offload`` if the experts are not those of the compiled provider."""
    return UserError(
        "--expert-offload needs the compiled CPU kernels: CPUs, a C++ compiler, and no --functions reference"
    )
