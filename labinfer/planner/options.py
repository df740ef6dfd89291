"""Options of ``launch.py probe`` and ``launch.py plan --auto``, and of probed machines (``--cluster``)."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.option_fields import option

OBJECTIVES = ("throughput", "latency", "memory")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Output of the measured costs."""

    save: str = option("", "also write the costs to this file, for launch.py plan --cluster", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Probed machines and the links between them."""

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
    """Choice of a layout from measured costs."""

    auto: bool = option(
        False,
        "choose machines, their order, tensor-parallel degrees and layers by measured costs: for the machines of --cluster, or for those "
        "of this launch, which measure first",
    )
    objective: str = option(
        "throughput",
        "tokens a second with requests always waiting, latency of one answer alone, or the most KV tokens at nine tenths of the "
        "best throughput",
        choices=OBJECTIVES,
    )
    workload: str = option(
        "",
        "lengths of requests: a trace of Azure, BurstGPT or Mooncake, JSONL with prompt_tokens and output_tokens, or, without --cluster, a "
        "job of prompts (default: "
        "512 in, 128 out)",
        metavar="FILE",
    )
    save: str = option("", "write the plan to this file, for --layout", metavar="FILE")
