"""merge_ranks: the costs of a machine from the measurements of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from labinfer.planner.costs import DraftBytes, HostCosts, LayerCosts, MeanBytes, Points
from labinfer.planner.overheads import Overheads

SECONDS = ("head", "embed", "all_reduce")
BYTES = ("hidden_bytes", "embedding_bytes", "head_bytes")
BYTES_BY_KIND = ("layer_bytes", "kv_bytes", "state_bytes")


def merge_ranks(ranks: Sequence[HostCosts]) -> HostCosts:
    """Costs of a machine: maximum seconds, maximum and mean bytes, minimum memory and minimum savings over its ranks. Other fields
    are those of ``ranks[0]``.

    Args:
        ranks: costs of the ranks of one machine, all with equal layers.
    """

    def most_by_kind(name: str) -> dict[str, int]:
        return {kind: max(getattr(costs, name)[kind] for costs in ranks) for kind in getattr(ranks[0], name)}

    def mean(values: Sequence[int]) -> int:
        return -(-sum(values) // len(values))

    def mean_by_kind(name: str) -> dict[str, int]:
        return {kind: mean([getattr(costs, name)[kind] for costs in ranks]) for kind in getattr(ranks[0], name)}

    changes = {name: merge_points([getattr(costs, name) for costs in ranks]) for name in SECONDS}
    changes |= {name: max(getattr(costs, name) for costs in ranks) for name in BYTES}
    changes |= {name: most_by_kind(name) for name in BYTES_BY_KIND}
    overheads = {name: max(getattr(costs.overheads, name) for costs in ranks) for name in Overheads.__struct_fields__}
    drafting = {name: max(getattr(costs.drafting, name) for costs in ranks) for name in DraftBytes.__struct_fields__}
    means = {name: mean([getattr(costs, name) for costs in ranks]) for name in (*BYTES[1:], "shared_bytes")}
    means |= {name: mean_by_kind(name) for name in BYTES_BY_KIND}
    are_equal = all(getattr(costs, name) == getattr(ranks[0], name) for costs in ranks for name in means)
    return msgspec.structs.replace(
        ranks[0],
        **changes,
        mean=None if are_equal else MeanBytes(**means),
        memory=min(costs.memory for costs in ranks),
        shared_bytes=min(costs.shared_bytes for costs in ranks),
        fixed=max(costs.fixed for costs in ranks),
        layer_kinds={kind: _merge_layers([c.layer_kinds[kind] for c in ranks]) for kind in ranks[0].layer_kinds},
        skipped=merge_points([costs.skipped for costs in ranks], min),
        overheads=Overheads(**overheads),
        drafting=DraftBytes(**drafting),
        measured=all(costs.measured for costs in ranks),
    )


def merge_points(points: Sequence[Points], choose: Callable[..., float] = max) -> Points:
    """Merge time curves: points at every size that any of ``points`` has, with the seconds of all curves there combined by
    ``choose``."""
    sizes = sorted({size for each in points for size in each.sizes})
    return Points(sizes, [choose([each.at(size) for each in points]) for size in sizes])


def _merge_layers(ranks: Sequence[LayerCosts]) -> LayerCosts:
    return LayerCosts(
        linear=merge_points([costs.linear for costs in ranks]),
        small=merge_points([costs.small for costs in ranks]),
        decode=tuple(map(max, zip(*(costs.decode for costs in ranks), strict=True))),
        chunk=tuple(map(max, zip(*(costs.chunk for costs in ranks), strict=True))),
        window=ranks[0].window,
        num_sums=ranks[0].num_sums,
    )
