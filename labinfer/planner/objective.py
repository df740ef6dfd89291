"""Criterion: what a layout is judged by, in seconds, from the steps that a workload makes of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from labinfer.base.errors import UserError
from labinfer.engine.cache_capacity import (
    BlockCounts,
    CacheRoom,
    SlidingWindow,
    WindowNeeds,
    count_blocks,
    draft_states_that_fit,
    pool_rooms,
)
from labinfer.planner.cluster import Cluster, NetworkLink
from labinfer.planner.costs import HostCosts
from labinfer.planner.prompt_chunks import prompt_chunks
from labinfer.planner.step_shape import StepShape
from labinfer.planner.workload import MeanRequest

SEQUENCE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of sequences at once that are tried, beside ``max_num_seqs`` itself."""

RESERVE = 0.015
"""Part of the room for a cache on which a plan does not count, so that a start can keep what it tells: other programs take memory until
then, and weights whose implementation is chosen anew may take more."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Options of the engine that a plan depends on; see ``config``."""

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    chunked_prefill_size: int = 512
    block_size: int = 16
    memory_utilization: float = 1.0
    """Fraction of what is free beside the weights that the cache may take."""
    kept: int | None = None
    """Tokens that a context shift keeps; None without any."""
    max_context: int = 0
    """Longest context of a start, where that is more than the ``max_model_len`` for which there must be room."""
    num_kv_blocks: int = 0
    """KV blocks that the user asks for; 0 for as many as there is room for."""

    @property
    def context(self) -> int:
        """Tokens of a sequence that may be in the cache at once."""
        return max(self.max_context, self.max_model_len)

    @property
    def useful_blocks(self) -> int:
        """KV blocks of as many of the longest sequences as may run at once; more can never be filled."""
        return self.max_num_seqs * -(-self.context // self.block_size)

    @property
    def sequence_counts(self) -> list[int]:
        return [count for count in SEQUENCE_COUNTS if count < self.max_num_seqs] + [self.max_num_seqs]


@dataclass(frozen=True)
class Room:
    """Least room that every stage must have."""

    kv_tokens: float
    num_seqs: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a layout."""

    machine: str
    costs: HostCosts
    begin: int
    """First layer."""
    end: int
    """Layer after the last one."""

    @property
    def layers(self) -> dict[str, int]:
        return self.costs.count_layers(self.begin, self.end)


def cache_room(
    costs: HostCosts, layers: Mapping[str, float], limits: EngineLimits, *, is_first: bool, is_last: bool
) -> CacheRoom:
    """Memory of each rank of a stage for its cache."""
    free = costs.memory - costs.weight_bytes(layers, is_first=is_first, is_last=is_last)
    if is_first and (draft_state := costs.drafting.first_state):
        free -= draft_state * draft_states_that_fit(
            int(max(0, free) * limits.memory_utilization), draft_state, limits.max_num_seqs
        )
    block_bytes = [
        float(limits.block_size * (costs.drafting.first_kv * is_first + costs.drafting.last_kv * is_last)),
        0.0,
    ]
    for kind, count in layers.items():
        block_bytes[costs.layer_kinds[kind].window > 0] += limits.block_size * count * costs.kv_bytes[kind]
    whole = math.ceil(sum(block_bytes))
    windowed = math.floor(block_bytes[1])
    return CacheRoom(
        num_bytes=math.floor(free * limits.memory_utilization * (1 - RESERVE)),
        block_bytes=whole - windowed,
        window_block_bytes=windowed,
        state_bytes=math.ceil(sum(count * costs.state_bytes.get(kind, 0) for kind, count in layers.items())),
    )


def stage_rooms(stages: Sequence[Stage], limits: EngineLimits) -> list[CacheRoom]:
    """Memory for the cache of each stage of a layout, as a start has it: together with all others in the same memory, of which ranks
    without a stage take nothing."""
    used, last = Counter[str](), len(stages) - 1
    for stage in stages:
        used[stage.machine] += stage.costs.tp_size
    rooms, memories = [], []
    for number, stage in enumerate(stages):
        costs, shares = stage.costs, stage.costs.sharing > 1
        if shares:
            memory = costs.memory * costs.sharing // used[stage.machine]
            costs = msgspec.structs.replace(costs.on_average, memory=memory)
        room = cache_room(costs, stage.layers, limits, is_first=number == 0, is_last=number == last)
        rooms.append(CacheRoom.sum([room] * costs.tp_size) if shares else room)
        memories.append(stage.machine if shares else number)
    return pool_rooms(rooms, memories)


def kv_blocks(stages: Sequence[Stage], limits: EngineLimits) -> BlockCounts:
    """KV blocks of a layout, with the room of each stage for them, as a start of it has them.

    Raises:
        UserError: a stage has no room for the blocks that the user asks for.
    """
    rooms, needs = stage_rooms(stages, limits), window_needs(stages[0].costs, limits)
    blocks = count_blocks(
        [room.for_blocks(limits.max_num_seqs) for room in rooms],
        limits.useful_blocks,
        needs,
        fixed=limits.num_kv_blocks,
    )
    if limits.num_kv_blocks:
        in_all_memory = stage_rooms(stages, replace(limits, memory_utilization=1.0))  # which they may take in a start
        for stage, room, most in zip(stages, rooms, in_all_memory, strict=True):
            needed = room.used_bytes(blocks)
            left = most.num_bytes - room.num_states(limits.max_num_seqs) * room.state_bytes
            if needed > left:
                raise UserError(
                    f"--num-kv-blocks {limits.num_kv_blocks} needs {needed >> 20} MiB on {stage.machine}, but {max(0, left) >> 20} MiB are "
                    "free beside the weights; give less, or leave it out"
                )
    return blocks


def window_needs(costs: HostCosts, limits: EngineLimits) -> WindowNeeds | None:
    """Blocks that layers with a window have use for; see ``SlidingWindow.needs``."""
    window = SlidingWindow(max(kind.window for kind in costs.layer_kinds.values()), limits.block_size)
    return window.needs(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        chunked_prefill_size=limits.chunked_prefill_size,
        max_model_len=limits.context,
        kept=limits.kept,
    )


def kv_room(
    costs: HostCosts, layers: Mapping[str, float], limits: EngineLimits, *, is_first: bool, is_last: bool
) -> tuple[int, int]:
    """KV blocks and states of sequences that a stage has room for in its share of its machine's memory; both at most what can be of
    use."""
    room = cache_room(costs, layers, limits, is_first=is_first, is_last=is_last)
    if room.num_bytes < 0:
        return 0, 0
    blocks = count_blocks(
        [room.for_blocks(limits.max_num_seqs)], limits.useful_blocks, window_needs(costs, limits)
    ).num_blocks
    return blocks, room.num_states(limits.max_num_seqs)


def has_room(
    costs: HostCosts, layers: Mapping[str, float], limits: EngineLimits, least: Room, *, is_first: bool, is_last: bool
) -> bool:
    """Whether a stage has the room that is asked for."""
    blocks, states = kv_room(costs, layers, limits, is_first=is_first, is_last=is_last)
    return blocks * limits.block_size >= least.kv_tokens and states >= least.num_seqs


def fits(stages: Sequence[Stage], limits: EngineLimits, least: Room) -> bool:
    """Whether every stage of a layout has the room that is asked for."""
    last = len(stages) - 1
    return all(
        has_room(stage.costs, stage.layers, limits, least, is_first=number == 0, is_last=number == last)
        for number, stage in enumerate(stages)
    )


def kv_tokens(stages: Sequence[Stage], limits: EngineLimits) -> int:
    """KV tokens for which every stage of a layout has room in its share of its machine's memory, as the search counts them."""
    last = len(stages) - 1
    return limits.block_size * min(
        kv_room(stage.costs, stage.layers, limits, is_first=number == 0, is_last=number == last)[0]
        for number, stage in enumerate(stages)
    )


Parts = tuple[tuple[float, StepShape], ...]
"""Steps, each with how often it is made."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A cost of layouts, in seconds a request: the less the better.

    It is a sum over the stages and hops, and the most of any stage or hop; either the larger of the two, or both together.
    """

    path: Parts
    """Steps whose time is summed over the stages; their activations make the hops."""
    bottleneck: Parts
    """Steps of which the slowest stage counts."""
    adds: bool
    """Whether sum and most are added; otherwise the larger is taken."""
    scale: float = 1.0
    """Requests' seconds in each second of the sum."""
    num_seqs: int = 1
    """Sequences at once."""
    num_batches: int = 1
    """Micro-batches in flight."""
    num_stages: tuple[int, int] = (1, 1 << 30)
    """Least and most stages of the layouts that it is for."""
    tokens_per_round: float = 0.0
    """Generated in a round, for throughput."""

    def value(self, total: float, most: float) -> float:
        return self.scale * (total + most if self.adds else max(total, most))

    def largest_bound(self, target: float, least_total: float) -> float:
        """The most of any stage must be below this for a value below ``target``."""
        return target / self.scale - (least_total if self.adds else 0.0)

    def hop_seconds(self, sender: HostCosts, receiver: HostCosts, link: NetworkLink) -> float:
        """Seconds of a hop between two stages."""
        return sum(weight * link.seconds(sender.sent_bytes(shape.rows, receiver)) for weight, shape in self.path)

    def transfer_seconds(self, sender: HostCosts, receiver: HostCosts, link: NetworkLink) -> float:
        """Seconds for which the link is busy, as the most of any stage or hop counts them."""
        rows = sum(weight * shape.rows for weight, shape in self.bottleneck)
        return sender.sent_bytes(rows, receiver) / link.bytes_per_second

    def return_seconds(self, link: NetworkLink) -> float:
        """Seconds that sampled tokens take from the last stage to the first."""
        return sum(weight for weight, _ in self.path) * link.latency

    def busy_share(self, stages: Sequence[Stage], number: int, value: float) -> float:
        """Part of the time in which a stage of a layout with this value computes."""
        parts = (*self.path, *self.bottleneck) if self.adds else self.bottleneck
        return self.scale * stage_seconds(parts, stages, number) / value

    def evaluate(self, stages: Sequence[Stage], cluster: Cluster) -> float:
        """Value of a layout, in which rank 0 is on the first stage."""
        paths = [stage_seconds(self.path, stages, number) for number in range(len(stages))]
        most = max(stage_seconds(self.bottleneck, stages, number) for number in range(len(stages)))
        hops, transfer = self.route_seconds(stages, cluster)
        return self.value(sum(paths) + hops, max(most, transfer))

    def route_seconds(self, stages: Sequence[Stage], cluster: Cluster) -> tuple[float, float]:
        """Seconds of all hops, that of the tokens back to the first stage included, and the most for which a link is busy."""
        hops = transfer = 0.0
        for sender, receiver in itertools.pairwise(stages):
            link = cluster.link(sender.machine, receiver.machine)
            hops += self.hop_seconds(sender.costs, receiver.costs, link)
            transfer = max(transfer, self.transfer_seconds(sender.costs, receiver.costs, link))
        if len(stages) > 1:
            hops += self.return_seconds(cluster.link(stages[-1].machine, stages[0].machine))
        return hops, transfer


def stage_seconds(parts: Parts, stages: Sequence[Stage], number: int) -> float:
    """Seconds that a stage of a layout takes for steps."""
    stage = stages[number]
    ends = {"is_first": number == 0, "is_last": number == len(stages) - 1}
    return sum(weight * stage.costs.stage_seconds(shape, stage.layers, **ends) for weight, shape in parts)


def make_criteria(objective: str, request: MeanRequest, limits: EngineLimits, num_stages: int) -> Iterator[Criterion]:
    """Criteria by which a layout of at most so many stages may be judged: it has the least value of those for its number of
    stages and for no more sequences than it has room for.

    Args:
        objective: ``throughput`` or ``latency``.
    """
    if objective == "latency":
        for count in range(1, num_stages + 1):
            yield _latency(request, limits, count)
        return
    for num_seqs in limits.sequence_counts:
        yield _throughput(request, limits, num_seqs, 1, (1, 1))
        for num_batches in range(1, min(2 * num_stages, num_seqs) + 1):
            fewest = max(2, -(-num_batches // 2))
            if fewest <= num_stages:
                yield _throughput(request, limits, num_seqs, num_batches, (fewest, num_stages))


def _throughput(
    request: MeanRequest, limits: EngineLimits, num_seqs: int, num_batches: int, num_stages: tuple[int, int]
) -> Criterion:
    """Seconds a request where there are always more waiting: a round of all micro-batches, of which some have a chunk of a
    prompt beside their decodes, so often that prompts come in as fast as answers end."""
    share = num_seqs / num_batches
    # A sequence whose prompt is being run does not generate; prompts count as one step.
    generating = share * request.output / (request.output + 1)
    budget, ratio = limits.max_num_batched_tokens, request.prompt / request.output
    decodes = min(generating, budget / (1 + ratio))
    context = decodes * request.decode_context
    steps = [
        (weight, StepShape(decodes, context, chunks, decodes + num_samples))
        for weight, chunks, num_samples in _chunk_steps(request, limits, decodes, num_batches, num_stages[0])
    ]
    return Criterion(
        path=tuple(steps),
        bottleneck=tuple((num_batches * weight, shape) for weight, shape in steps),
        adds=False,
        scale=request.output / (decodes * num_batches),
        num_seqs=num_seqs,
        num_batches=num_batches,
        num_stages=num_stages,
        tokens_per_round=decodes * num_batches,
    )


def _chunk_steps(
    request: MeanRequest, limits: EngineLimits, decodes: float, num_batches: int, num_stages: int
) -> Iterator[tuple[float, tuple[tuple[float, float], ...], float]]:
    """Parts of all steps: how often, with which chunks, and how many of these are sampled.

    Args:
        decodes: generated tokens of each step.
    """
    chunks = prompt_chunks(
        request.prompt,
        limits,
        num_stages=num_stages,
        num_batches=num_batches,
        num_decodes=decodes,
        others_wait=True,
    )
    prompts = decodes / request.output  # that come in with each step
    longer = max(0.0, request.prompt_context - request.prompt / 2)  # tokens before a chunk where prompts are unlike
    if prompts * len(chunks) >= 1:
        pieces = math.ceil(prompts)
        size = prompts * request.prompt / pieces
        yield 1.0, ((size, longer + (request.prompt - size) / 2),) * pieces, prompts
        return
    yield 1 - prompts * len(chunks), (), 0.0
    first, others = chunks[0], len(chunks) - 1
    yield prompts, ((first, longer),), float(not others)
    if others:
        rest = request.prompt - first
        yield prompts * others, ((rest / others, longer + first + rest * (others - 1) / (2 * others)),), 1 / others


def _latency(request: MeanRequest, limits: EngineLimits, num_stages: int) -> Criterion:
    """Seconds of one answer, with nothing else to do: its chunks follow each other through the stages, then its tokens go
    round one by one."""
    count = len(
        prompt_chunks(
            request.prompt, limits, num_stages=num_stages, num_batches=num_stages, num_decodes=0, others_wait=False
        )
    )
    chunks = ((request.prompt / count, max(0.0, request.prompt_context - request.prompt / count / 2)),)
    token = StepShape(1, request.decode_context, (), 1)
    path: Parts = ((1.0, StepShape(chunks=chunks, num_samples=1)), (max(0.0, request.output - 1), token))
    return Criterion(
        path=path,
        bottleneck=((count - 1.0, StepShape(chunks=chunks)),),
        adds=True,
        num_stages=(num_stages, num_stages),
    )
