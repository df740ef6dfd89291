"""The flags of ``launch.py supervise``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.config import option


@dataclass(frozen=True, kw_only=True)
class SuperviseOptions:
    """Restarts of what stands behind ``--``: a launcher with ``launch.py serve …``, or with a job that has an ``--output``."""

    max_restarts: int = option(
        10, "times that the group is started again; forgotten when it has run for ten minutes", metavar="N"
    )
