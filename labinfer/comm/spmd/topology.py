"""Topology: rank ↔ (stage, tp rank), and the layers of each stage; ranges cut into shards.

Pure arithmetic, without torch, communicators and the machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from labinfer.base.errors import UserError

START_RANKS = "start {0} (torchrun --nproc-per-node {0} or mpirun -n {0})"
"""Advice that gives so many ranks."""


def shard_range(total: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(total)`` into ``parts`` contiguous (begin, end) ranges, as even as they go.

    Earlier parts get the remainder. Ranges begin at multiples of ``unit`` where ``total`` is one.
    """
    if unit > 1 and total % unit == 0 and total // unit >= parts:
        return [(begin * unit, end * unit) for begin, end in shard_range(total // unit, parts)]
    size, rest = divmod(total, parts)
    bounds = [index * size + min(index, rest) for index in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Place:
    """Position of a rank in the layout."""

    rank: int
    stage: int
    tp_rank: int
    tp_size: int

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, tp {self.tp_rank})"


@dataclass(frozen=True)
class Topology:
    """The layout of a run: tp degree, layers and ranks of each stage. Ranks without a place are spare."""

    tp_sizes: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    """(begin, end) layer numbers of each stage."""
    ranks: tuple[int, ...] = ()
    """Ranks of stage 0, then those of stage 1, …; empty where they simply count up."""

    @property
    def num_stages(self) -> int:
        return len(self.tp_sizes)

    @property
    def num_places(self) -> int:
        return sum(self.tp_sizes)

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of a stage, ascending, which is the order of their tp ranks."""
        begin = sum(self.tp_sizes[:stage])
        return tuple(sorted((self.ranks or range(self.num_places))[begin : begin + self.tp_sizes[stage]]))

    def place(self, rank: int) -> Place:
        """Stage and tp rank of a rank.

        Raises:
            ValueError: the layout has no such rank.
        """
        for stage, tp_size in enumerate(self.tp_sizes):
            if rank in (ranks := self.stage_ranks(stage)):
                return Place(rank, stage, ranks.index(rank), tp_size)
        raise ValueError(f"rank {rank} is outside this layout of {_ranks(self.num_places)}")

    @property
    def placed_ranks(self) -> tuple[int, ...]:
        """Ranks that have a place, ascending."""
        return tuple(sorted(self.ranks or range(self.num_places)))

    @property
    def places(self) -> list[Place]:
        """All places, in order of their ranks."""
        return [self.place(rank) for rank in self.placed_ranks]

    @property
    def command_order(self) -> tuple[int, ...]:
        """Rank 0, which gives commands, then all others that have a place, in the order of their stages."""
        placed = (rank for stage in range(self.num_stages) for rank in self.stage_ranks(stage))
        return (0, *(rank for rank in placed if rank))

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    @property
    def sampling_rank(self) -> int:
        """The rank that samples: the first of the last stage."""
        return self.stage_ranks(self.num_stages - 1)[0]

    def activation_source(self, place: Place) -> int | None:
        """The rank that sends this one its activations: sender ``j mod tp`` of the stage before; None on stage 0."""
        if self.is_first(place.stage):
            return None
        senders = self.stage_ranks(place.stage - 1)
        return senders[place.tp_rank % len(senders)]

    def activation_destinations(self, place: Place) -> list[int]:
        """The ranks of the next stage that this one sends its activations to; empty on the last stage."""
        if self.is_last(place.stage):
            return []
        receivers = self.stage_ranks(place.stage + 1)
        return [receivers[j] for j in range(len(receivers)) if j % place.tp_size == place.tp_rank]

    def check_nodes(self, nodes: Sequence[str]) -> None:
        """Check that the ranks of every stage are on one node.

        Args:
            nodes: name of each rank's node.

        Raises:
            UserError: the ranks of a stage are on several nodes; the text names them, and what to do.
        """
        for stage, tp_size in enumerate(self.tp_sizes):
            on = {rank: nodes[rank] for rank in self.stage_ranks(stage)}
            if len(set(on.values())) > 1:
                where = ", ".join(f"rank {rank} on {node}" for rank, node in on.items())
                node, most = Counter(nodes).most_common(1)[0]
                if most >= tp_size and self.ranks:
                    there = ", ".join(str(rank) for rank, name in enumerate(nodes) if name == node)
                    hint = f"let --ranks name ranks of one node for it, spare ones included: {node} has {there}"
                elif most >= tp_size:
                    hint = "start the ranks of a node one after another (by slot, not by node)"
                else:
                    hint = f"no node has more than {_ranks(most)}, so use a -tp of at most {most} and more stages (-pp)"
                raise UserError(
                    f"--tensor-parallel-size {tp_size} needs {_ranks(tp_size)} on one node for stage {stage}, but it has {where}; {hint}"
                )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Check ``--ranks`` against the number of ranks that were started.

    Raises:
        UserError: a rank was not started or is named twice, or rank 0, which schedules, is left out.
    """
    flag = f"--ranks {','.join(map(str, ranks))}"
    if unknown := [rank for rank in ranks if rank >= world_size]:
        raise UserError(f"{flag} names rank {unknown[0]}, but ranks are 0 to {world_size - 1}")
    if len(set(ranks)) < len(ranks):
        raise UserError(f"{flag} names rank {next(r for r in ranks if ranks.count(r) > 1)} twice; name each once")
    if 0 not in ranks:
        raise UserError(f"{flag} leaves out rank 0, which schedules; put it on any stage")


def stage_sizes(
    tp: tuple[int, ...],
    pp: int,
    layers: tuple[int, ...],
    world_size: int,
    *,
    ranks: tuple[int, ...] = (),
    remedy: str = START_RANKS,
) -> tuple[int, ...]:
    """The tensor-parallel degree of each stage, which does not depend on the model. For the arguments see ``make_topology``.

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
    """Build the layout from the flags; ``pp`` 0 means as many stages as the ranks allow.

    Args:
        ranks: see ``Topology.ranks``; all ``world_size`` ranks where it is empty.
        last_cut: the last layer with which a stage may begin; None for any.
        remedy: advice like ``START_RANKS``.

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
                f"--layers {','.join(map(str, layers))} names the layers of {len(layers)} stage{'s' * (len(layers) != 1)}, but there are {pp}"
            )
        if sum(layers) != num_layers:
            raise UserError(
                f"--layers {','.join(map(str, layers))} adds up to {sum(layers)}, but the model has {num_layers} layers"
            )
        ends = [sum(layers[: stage + 1]) for stage in range(pp)]
        if last_cut is not None and (begin := num_layers - layers[-1]) > last_cut:
            raise UserError(
                f"--layers {','.join(map(str, layers))} begins the last stage with layer {begin}, but later layers read the "
                f"cache of layer {last_cut}, which must be on it; give it at least {num_layers - last_cut} layers"
            )
        return Topology(tp, tuple(zip([0, *ends[:-1]], ends, strict=True)), ranks)
    ranges = shard_range(num_layers, pp)
    if last_cut is not None and ranges[-1][0] > last_cut and pp > 1:
        if pp - 1 > last_cut:
            raise UserError(
                f"--pipeline-parallel-size {pp} is too much for this model: its layers from {last_cut} on, which share a cache, "
                f"are all on the last stage; use at most {last_cut + 1} stages"
            )
        ranges = [*shard_range(last_cut, pp - 1), (last_cut, num_layers)]
    return Topology(tp, tuple(ranges), ranks)


def per_stage(flag: str, values: Sequence[str], num_stages: int) -> tuple[str, ...]:
    """A value for every stage, from one value for all or one value a stage.

    Raises:
        UserError: any other number of values.
    """
    if len(values) == 1:
        return tuple(values) * num_stages
    if len(values) != num_stages:
        raise UserError(
            f"{flag} {','.join(values)} has {len(values)} values for {num_stages} stage{'s' * (num_stages != 1)}; give one, or one per stage"
        )
    return tuple(values)
