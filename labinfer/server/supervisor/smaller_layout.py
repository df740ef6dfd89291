"""smaller_layout: a layout for the ranks that remain when machines are lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from labinfer.base.config import EngineOptions, ModelOptions
from labinfer.base.errors import UserError
from labinfer.base.option_fields import join
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.comm.spmd.topology import make_topology


def smaller_layout(options: EngineOptions, nodes: Sequence[str], left: Sequence[int]) -> list[str]:
    """Command-line flags of a layout for the remaining ranks ``left``. A stage is kept if it lost no rank, or if spare
    ranks can replace the lost ones.

    A spare rank with the draft model keeps the draft model. If the spare rank is lost or needed for a stage, drafts come from
    n-grams instead. Layer counts set with ``--layers`` are scaled up in proportion. Flags with one value per stage keep the values
    of the remaining stages. With ``--layout`` the list is empty: the ranks read the file or make a plan again.

    Args:
        nodes: node of each rank of the group with all machines.
        left: remaining ranks, ascending. They are renumbered from 0 in this order.

    Raises:
        UserError: rank 0 is lost.
    """
    if 0 not in left:
        raise UserError(f"rank 0, which schedules, was on {nodes[0]}")
    parallel = options.parallel
    if parallel.layout:  # the ranks check whether a saved plan still fits
        return []
    topology = make_topology(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.layers,
        sum(parallel.layers) or len(nodes),
        len(nodes),
        ranks=parallel.ranks,
    )
    speculation = options.scheduler.speculative_config
    draft_rank = speculation.draft_rank if speculation else 0
    spare = sorted(set(left).difference(topology.placed_ranks), key=lambda rank: (rank == draft_rank, rank))
    stages: dict[int, Sequence[int]] = {}
    for stage in range(topology.num_stages):
        ranks = topology.stage_ranks(stage)
        if not set(ranks) <= set(left):
            ranks = _stand_ins(spare, nodes, len(ranks))
            spare = [rank for rank in spare if rank not in ranks]
        if ranks:
            stages[stage] = ranks
    tp = [len(ranks) for ranks in stages.values()]
    flags = ["-tp", join(tp), "-pp", str(len(tp))]
    order = [left.index(rank) for ranks in stages.values() for rank in ranks]
    if parallel.ranks or order != list(range(len(left))):
        flags += ["--ranks", join(order)]
    if parallel.layers:
        flags += ["--layers", join(_grown([parallel.layers[stage] for stage in stages], sum(parallel.layers)))]
    for flag, values in (
        ("--dtype", options.model.dtype),
        ("--quantization", options.model.quantization),
        ("--device", parallel.device),
        ("--experts", parallel.experts),
    ):
        if len(values) > 1:
            flags += [flag, join([values[stage] for stage in stages])]
    if draft_rank:
        drafts: dict[str, Any] = {"method": "ngram"}
        if draft_rank in spare:
            moved = asdict(replace(speculation, draft_rank=left.index(draft_rank)))
            drafts = {key: value for key, value in moved.items() if value != getattr(SpeculativeOptions, key)}
        flags += ["--speculative-config", json.dumps(drafts)]
    given = options.model.quantization
    if "int4" in given and len(given) > 1 and "int4" not in [given[stage] for stage in stages]:
        flags += ["--quantization-group-size", str(ModelOptions.quantization_group_size)]
    return flags


def _stand_ins(spare: Sequence[int], nodes: Sequence[str], count: int) -> list[int]:
    """Choose ``count`` spare ranks of a single node; empty if no node has as many spare ranks."""
    for node in dict.fromkeys(nodes[rank] for rank in spare):
        ranks = [rank for rank in spare if nodes[rank] == node]
        if len(ranks) >= count:
            return ranks[:count]
    return []


def _grown(counts: Sequence[int], total: int) -> list[int]:
    """Increase integer counts in about the same proportions, so that their sum is ``total``."""
    ends = [round(total * end / sum(counts)) for end in itertools.accumulate(counts, initial=0)]
    return [end - begin for begin, end in itertools.pairwise(ends)]
