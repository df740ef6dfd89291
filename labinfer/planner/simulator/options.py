"""Options of ``launch.py simulate``, in addition to those of ``bench serve``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.option_fields import option
from labinfer.planner.options import ClusterOptions


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(ClusterOptions):
    """Options of a simulation: source of the step times, and the search for the highest request rate. With --cluster, the flags
    -tp, -pp, --layers and --ranks set the layout. Ranks are numbered host by host."""

    replay: str = option(
        "",
        "take all step times from this trace, written with --trace by a real run; give the other options as in that "
        "run",
        metavar="TRACE",
    )
    find_rate: bool = option(
        False,
        "find the highest --request-rate at which the 99th percentiles meet all --goodput targets",
    )
