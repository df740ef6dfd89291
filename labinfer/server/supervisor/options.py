"""Options of ``launch.py supervise``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.config import MAX_TIMEOUT
from labinfer.base.errors import UserError
from labinfer.base.option_fields import option


@dataclass(frozen=True, kw_only=True)
class SuperviseOptions:
    """How to restart the command after ``--``, which is a launcher with ``launch.py serve …`` or with a job that has an
    ``--output``."""

    max_restarts: int = option(
        10, "maximum number of restarts; the count is reset after ten minutes without a failure", metavar="N"
    )
    rejoin_timeout: float = option(
        60.0,
        "seconds to wait, after a failure, for a host of mpirun's list that does not answer; then the remaining "
        "ranks continue with a layout that fits them",
        metavar="S",
    )

    def __post_init__(self) -> None:
        if not self.rejoin_timeout < MAX_TIMEOUT:  # also true for NaN
            raise UserError(f"--rejoin-timeout must be under {MAX_TIMEOUT:g} seconds, not {self.rejoin_timeout}")
