"""Topology: rank ↔ (stage, tp rank), and the layers of each stage; division of ranges into shards.

Pure arithmetic, independent of torch, communicators and the machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from labinfer.base.errors import UserError

START_RANKS = "start {0} (torchrun --nproc-per-node {0}, mpirun -n {0} or srun -n {0})"
"""Advice to start a given number of ranks."""


def shard_range(total: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Divide ``range(total)`` into ``parts`` contiguous (begin, end) ranges, as evenly as possible.

    Earlier parts get the remainder. Ranges begin at multiples of ``unit`` if ``total`` is a multiple of it with at least ``parts`` units.
    """
    if unit > 1 and total % unit == 0 and total // unit >= parts:
        return [(begin * unit, end * unit) for begin, end in shard_range(total // unit, parts)]
    size, rest = divmod(total, parts)
    bounds = [index * size + min(index, rest) for index in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Place:
    """Position of a rank in the layout: its stage, and its tensor-parallel rank there."""

    rank: int
    stage: int
    tp_rank: int
    tp_size: int

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, tp {self.tp_rank})"


@dataclass(frozen=True)
class Topology:
    """TP degree, layers and ranks of each stage. Ranks without a place are spare."""

    tp_sizes: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    """(begin, end) layer indices of each stage."""
    ranks: tuple[int, ...] = ()
    """Ranks of stage 0, then those of stage 1, …; empty for consecutive ranks from 0."""

    @property
    def num_stages(self) -> int:
        return len(self.tp_sizes)

    @property
    def num_places(self) -> int:
        return sum(self.tp_sizes)

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of a stage in ascending order, which is the order of their tp ranks."""
        begin = sum(self.tp_sizes[:stage])
        return tuple(sorted((self.ranks or range(self.num_places))[begin : begin + self.tp_sizes[stage]]))

    def place(self, rank: int) -> Place:
        """Stage and tp rank of a rank.

        Raises:
            ValueError: ``rank`` has no place in the layout.
        """
        for stage, tp_size in enumerate(self.tp_sizes):
            if rank in (ranks := self.stage_ranks(stage)):
                return Place(rank, stage, ranks.index(rank), tp_size)
        raise ValueError(f"rank {rank} is outside this layout of {_ranks(self.num_places)}")

    @property
    def placed_ranks(self) -> tuple[int, ...]:
        """Ranks that hold a part of the model (have a place), ascending."""
        return tuple(sorted(self.ranks or range(self.num_places)))

    @property
    def places(self) -> list[Place]:
        """Place of each rank that has one, in rank order."""
        return [self.place(rank) for rank in self.placed_ranks]

    @property
    def command_order(self) -> tuple[int, ...]:
        """Rank 0, which sends commands, then all other placed ranks in stage order."""
        placed = (rank for stage in range(self.num_stages) for rank in self.stage_ranks(stage))
        return (0, *(rank for rank in placed if rank))

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    @property
    def sampling_rank(self) -> int:
        """Rank that samples: the first of the last stage."""
        return self.stage_ranks(self.num_stages - 1)[0]

    def activation_source(self, place: Place) -> int | None:
        """Rank that sends activations to this place: number ``tp_rank mod (TP degree)`` of the previous stage; None on stage 0."""
        if self.is_first(place.stage):
            return None
        senders = self.stage_ranks(place.stage - 1)
        return senders[place.tp_rank % len(senders)]

    def activation_destinations(self, place: Place) -> list[int]:
        """Ranks of the next stage that receive this place's activations; empty on the last stage."""
        if self.is_last(place.stage):
            return []
        receivers = self.stage_ranks(place.stage + 1)
        return [receivers[j] for j in range(len(receivers)) if j % place.tp_size == place.tp_rank]

    def check_nodes(self, nodes: Sequence[str]) -> None:
        """Check that the ranks of every stage are on one node.

        Args:
            nodes: node name of each rank.

        Raises:
            UserError: the ranks of a stage are on several nodes; the message names them and a remedy.
        """
        for stage, tp_size in enumerate(self.tp_sizes):
            on = {rank: nodes[rank] for rank in self.stage_ranks(stage)}
            if len(set(on.values())) > 1:
                where = ", ".join(f"rank {rank} on {node}" for rank, node in on.items())
                node, most = Counter(nodes).most_common(1)[0]
                if most >= tp_size and self.ranks:
                    there = ", ".join(str(rank) for rank, name in enumerate(nodes) if name == node)
                    hint = f"choose ranks of one node for it with --ranks (spare ranks included): {node} has {there}"
                elif most >= tp_size:
                    hint = "start the ranks of a node one after another (by slot, not by node)"
                else:
                    hint = f"no node has more than {_ranks(most)}; use -tp {most} or less, and more stages (-pp)"
                raise UserError(
                    f"--tensor-parallel-size {tp_size} needs {_ranks(tp_size)} on one node for stage {stage}, but it has {where}; {hint}"
                )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Check ``--ranks`` against the number of started ranks.

    Raises:
        UserError: a rank was not started or is named twice, or rank 0, which schedules, is left out.
    """
    flag = f"--ranks {','.join(map(str, ranks))}"
    if unknown := [rank for rank in ranks if rank >= world_size]:
        raise UserError(f"{flag} names rank {unknown[0]}, but ranks are 0 to {world_size - 1}")
    if len(set(ranks)) < len(ranks):
        raise UserError(f"{flag} names rank {next(r for r in ranks if ranks.count(r) > 1)} twice; name each once")
    if 0 not in ranks:
        raise UserError(f"{flag} leaves out rank 0, which schedules; add it to any stage")


def stage_sizes(
    tp: tuple[int, ...],
    pp: int,
    layers: tuple[int, ...],
    world_size: int,
    *,
    ranks: tuple[int, ...] = (),
    remedy: str = START_RANKS,
) -> tuple[int, ...]:
    """Tensor-parallel degree of each stage, independent of the model. See ``make_topology`` for the arguments.

    Raises:
        UserError: the flags contradict each other or the number of ranks.
    """
    if ranks:
        check_ranks(ranks, world_size)
    num_ranks = len(ranks) or world_size
    if pp == 0:
        pp = len(tp) if len(tp) > 1 else len(layers) or max(1, num_ranks // tp[0])
    if len(tp) == 1:
        tp = tp * pp
    if len(tp) != pp:
        raise UserError(
            f"--tensor-parallel-size {','.join(map(str, tp))} names {len(tp)} stages, but --pipeline-parallel-size is {pp}"
        )
    if sum(tp) != num_ranks:
        shape = f"-tp {tp[0]} -pp {pp}" if len(set(tp)) == 1 else f"-tp {','.join(map(str, tp))}"
        needs = f"the layout {shape} needs {_ranks(sum(tp))}, but "
        if ranks:
            raise UserError(f"{needs}--ranks names {num_ranks}; change one of them")
        there = "there is 1" if world_size == 1 else f"there are {world_size}"
        raise UserError(f"{needs}{there}; {remedy.format(sum(tp), ranks=_ranks(sum(tp)))} or change -tp and -pp")
    return tp


def make_topology(
    tp: tuple[int, ...],
    pp: int,
    layers: tuple[int, ...],
    num_layers: int,
    world_size: int,
    *,
    ranks: tuple[int, ...] = (),
    last_cut: int | None = None,
    remedy: str = START_RANKS,
) -> Topology:
    """Build the topology from the flags. ``pp`` 0 means as many stages as the ranks allow.

    Args:
        ranks: see ``Topology.ranks``; empty for all ``world_size`` ranks.
        last_cut: largest index of a layer that may begin a stage; None if any may.
        remedy: format string of advice, such as ``START_RANKS``.

    Raises:
        UserError: the flags contradict each other, the model or the number of ranks.
    """
    tp = stage_sizes(tp, pp, layers, world_size, ranks=ranks, remedy=remedy)
    pp = len(tp)
    if pp > num_layers:
        raise UserError(
            f"--pipeline-parallel-size {pp} is more than the model's {num_layers} layers; use at most {num_layers} stages"
        )
    if layers:
        if len(layers) != pp:
            raise UserError(
                f"--layers {','.join(map(str, layers))} has {len(layers)} stage{'s' * (len(layers) != 1)}, but "
                f"there are {pp}"
            )
        if sum(layers) != num_layers:
            raise UserError(
                f"--layers {','.join(map(str, layers))} adds up to {sum(layers)}, but the model has {num_layers} layers"
            )
        ends = [sum(layers[: stage + 1]) for stage in range(pp)]
        if last_cut is not None and (begin := num_layers - layers[-1]) > last_cut:
            raise UserError(
                f"--layers {','.join(map(str, layers))} starts the last stage at layer {begin}, but it must hold "
                f"layer {last_cut}, whose KV cache later layers share; give it at least {num_layers - last_cut} "
                "layers"
            )
        return Topology(tp, tuple(zip([0, *ends[:-1]], ends, strict=True)), ranks)
    ranges = shard_range(num_layers, pp)
    if last_cut is not None and ranges[-1][0] > last_cut and pp > 1:
        if pp - 1 > last_cut:
            raise UserError(
                f"--pipeline-parallel-size {pp} is too large for this model: its layers from {last_cut} on share a "
                f"KV cache and must be on the last stage; use at most {last_cut + 1} stages"
            )
        ranges = [*shard_range(last_cut, pp - 1), (last_cut, num_layers)]
    return Topology(tp, tuple(ranges), ranks)


def per_stage(flag: str, values: Sequence[str], num_stages: int, what: str = "stage") -> tuple[str, ...]:
    """One value per stage (or per ``what``), from ``values``: one for all stages, or one per stage.

    Raises:
        UserError: any other number of values.
    """
    if len(values) == 1:
        return tuple(values) * num_stages
    if len(values) != num_stages:
        raise UserError(
            f"{flag} {','.join(values)} has {len(values)} values for {num_stages} {what}{'s' * (num_stages != 1)}; give one, or one per {what}"
        )
    return tuple(values)
