"""Options of machines that need not be there, and of ``launch.py plan --auto``."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.option_fields import option
from labinfer.planner.objective import OBJECTIVES


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Machines and their links."""

    cluster: tuple[str, ...] = option(
        (), "costs of machines: files that launch.py probe --save wrote", metavar="FILE[,FILE…]"
    )
    link: tuple[str, ...] = option(
        (),
        "network between two machines, such as a:b=1gbit,0.3ms, or 1gbit,0.3ms between all others; may be given several times",
        metavar="[A:B=]RATE,LATENCY",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ClusterOptions):
    """Choice of a layout by measured costs."""

    auto: bool = option(
        False, "choose machines, their order, tensor-parallel degrees and layers for the machines of --cluster"
    )
    objective: str = option(
        "throughput",
        "tokens a second with requests always waiting, latency of one answer alone, or the most KV tokens at nine tenths of the "
        "best throughput",
        choices=OBJECTIVES,
    )
    workload: str = option(
        "",
        "lengths of requests: a trace of Azure, BurstGPT or Mooncake, or JSONL with prompt_tokens and output_tokens (default: "
        "512 in, 128 out)",
        metavar="FILE",
    )
    save: str = option("", "write the plan to this file", metavar="FILE")
