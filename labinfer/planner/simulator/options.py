"""Options of ``launch.py simulate``, in addition to those of ``bench serve``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.option_fields import option
from labinfer.planner.options import ClusterOptions


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(ClusterOptions):
    """Source of the simulated times, and the goal of the search. On machines of --cluster, -tp, -pp, --layers and --ranks give the
    layout; ranks are numbered machine by machine."""

    replay: str = option(
        "",
        "take all times from this file, which --trace of a real run wrote; the other options are to be those of that run",
        metavar="TRACE",
    )
    find_rate: bool = option(
        False,
        "look for the highest --request-rate at which the 99th percentiles keep all goals of --goodput",
    )
