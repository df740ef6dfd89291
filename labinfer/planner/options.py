"""Options of ``launch.py probe`` and ``launch.py plan --auto``, and options that describe a cluster of probed machines
(``--cluster``)."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.option_fields import option

OBJECTIVES = ("throughput", "latency", "memory")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of ``launch.py probe``: where the measured costs are saved."""

    save: str = option("", "also write the measured costs to this file, for launch.py plan --cluster", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options that describe a cluster: files with the costs of its hosts, and the links between hosts."""

    cluster: tuple[str, ...] = option(
        (), "cost files of hosts, written by launch.py probe --save", metavar="FILE[,FILE…]"
    )
    link: tuple[str, ...] = option(
        (),
        "network between two hosts, such as a:b=1gbit,0.3ms, or 1gbit,0.3ms for all other pairs; repeatable",
        metavar="[A:B=]RATE,LATENCY",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ClusterOptions):
    """Options of ``launch.py plan``: how to choose a layout from measured costs, and where to save it."""

    auto: bool = option(
        False,
        "choose hosts, their order, tensor-parallel sizes and layers per stage from measured costs: of the hosts in "
        "--cluster, or of the hosts of this launch, which are measured first",
    )
    objective: str = option(
        "throughput",
        "throughput (tokens per second under constant load), latency (of a single request) or memory (the most KV "
        "cache tokens at 90 % of the best throughput)",
        choices=OBJECTIVES,
    )
    workload: str = option(
        "",
        "request lengths: an Azure, BurstGPT or Mooncake trace, JSONL with prompt_tokens and output_tokens, or, "
        "without --cluster, a JSONL file of prompts (default: 512 prompt and 128 output tokens)",
        metavar="FILE",
    )
    save: str = option("", "write the plan to this file, for --layout", metavar="FILE")
