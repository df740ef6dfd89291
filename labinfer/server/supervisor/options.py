"""Options of ``launch.py supervise``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.config import MAX_TIMEOUT
from labinfer.base.errors import UserError
from labinfer.base.option_fields import option


@dataclass(frozen=True, kw_only=True)
class SuperviseOptions:
    """Restarts of what stands behind ``--``: a launcher with ``launch.py serve …``, or with a job that has an ``--output``."""

    max_restarts: int = option(
        10, "times that the group is started again; forgotten when it has run for ten minutes", metavar="N"
    )
    rejoin_timeout: float = option(
        60.0,
        "seconds that a machine which does not answer after a death is waited for, where mpirun is given its hosts; then the "
        "ranks of the others go on with a layout that fits them",
        metavar="S",
    )

    def __post_init__(self) -> None:
        if not self.rejoin_timeout < MAX_TIMEOUT:  # also true for NaN
            raise UserError(f"--rejoin-timeout must be under {MAX_TIMEOUT:g} seconds, not {self.rejoin_timeout}")
