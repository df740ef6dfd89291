"""Options of ``launch.py simulate``, beside those of ``bench serve``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.option_fields import option


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Times of the micro-batches, and what is looked for."""

    cluster: tuple[str, ...] = option(
        (),
        "take them from the costs of machines in these files, which launch.py probe --save wrote; the layout is that of -tp, -pp, "
        "--layers and --ranks, with ranks counting up from machine to machine",
        metavar="FILE[,FILE…]",
    )
    link: tuple[str, ...] = option(
        (),
        "network between two machines, such as a:b=1gbit,0.3ms, or 1gbit,0.3ms between all others; may be given several times",
        metavar="[A:B=]RATE,LATENCY",
    )
    replay: str = option(
        "",
        "take them from this file, which --trace of a real run wrote; the other options are to be those of that run",
        metavar="TRACE",
    )
    find_rate: bool = option(
        False,
        "look for the highest --request-rate at which the 99th percentiles keep all goals of --goodput",
    )
