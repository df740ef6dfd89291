"""Criterion: the cost of a layout, in seconds per request, from the steps that a workload needs."""

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
"""Numbers of concurrent sequences to try, in addition to ``max_num_seqs`` itself."""

RESERVE = 0.015
"""Fraction of the cache memory that a plan leaves unused, so that a launch has at least the planned KV tokens. Before the launch,
other programs may take memory, and autotuning may choose implementations that pack weights larger."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Engine options that affect a plan; see ``base/config.py``."""

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    chunked_prefill_size: int = 512
    block_size: int = 16
    memory_utilization: float = 1.0
    """Fraction of the memory left by the weights that the KV cache and recurrent states may take."""
    kept: int | None = None
    """Number of tokens at the start of a sequence that a context shift keeps; None without context shift."""
    max_context: int = 0
    """Maximum context length of the model, to which a launch without ``--max-model-len`` goes; 0 if that option is given. The
    workload may need less (``max_model_len``), but the KV cache must have room for one sequence of this length."""
    num_kv_blocks: int = 0
    """KV blocks that the user asks for; 0 for as many as fit."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of one sequence in the KV cache."""
        return max(self.max_context, self.max_model_len)

    @property
    def useful_blocks(self) -> int:
        """KV blocks of ``max_num_seqs`` sequences of maximum length; more can never be filled."""
        return self.max_num_seqs * -(-self.context // self.block_size)

    @property
    def sequence_counts(self) -> list[int]:
        return [count for count in SEQUENCE_COUNTS if count < self.max_num_seqs] + [self.max_num_seqs]


@dataclass(frozen=True)
class CacheDemand:
    """Cache capacity that every stage of a layout must have."""

    kv_tokens: float
    num_seqs: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a layout: its layers, and the costs of the machine that runs them."""

    machine: str
    costs: HostCosts
    begin: int
    """Index of the stage's first layer."""
    end: int
    """End of the stage's layers: one past the last layer."""

    @property
    def layers(self) -> dict[str, int]:
        return self.costs.count_layers(self.begin, self.end)


def cache_room(
    costs: HostCosts, layers: Mapping[str, float], limits: EngineLimits, *, is_first: bool, is_last: bool
) -> CacheRoom:
    """Memory for KV cache and recurrent states on each rank of a stage."""
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
    """Memory for KV cache and recurrent states of each stage of a layout, computed as at the start of a launch. Stages whose ranks
    share the memory of a machine also share these bytes; ranks without a stage take none."""
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
    """KV blocks of a layout, and the capacity of each stage, computed as at the start of a launch.

    Raises:
        UserError: a stage has no room for ``limits.num_kv_blocks``.
    """
    rooms, needs = stage_rooms(stages, limits), window_needs(stages[0].costs, limits)
    blocks = count_blocks(
        [room.for_blocks(limits.max_num_seqs) for room in rooms],
        limits.useful_blocks,
        needs,
        fixed=limits.num_kv_blocks,
    )
    if limits.num_kv_blocks:
        in_all_memory = stage_rooms(
            stages, replace(limits, memory_utilization=1.0)
        )  # memory_utilization does not limit num_kv_blocks
        for stage, room, most in zip(stages, rooms, in_all_memory, strict=True):
            needed = room.used_bytes(blocks)
            left = most.num_bytes - room.num_states(limits.max_num_seqs) * room.state_bytes
            if needed > left:
                raise UserError(
                    f"--num-kv-blocks {limits.num_kv_blocks} needs {needed >> 20} MiB on {stage.machine}, but "
                    f"{max(0, left) >> 20} MiB are free after the weights; give less, or leave it out"
                )
    return blocks


def window_needs(costs: HostCosts, limits: EngineLimits) -> WindowNeeds | None:
    """Number of window blocks that sliding-window layers need; None if window blocks of their own save no memory."""
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
    """KV blocks and sequence states that fit on a stage in its share of the machine's memory. Both numbers are limited to what
    ``max_num_seqs`` sequences can use."""
    room = cache_room(costs, layers, limits, is_first=is_first, is_last=is_last)
    if room.num_bytes < 0:
        return 0, 0
    blocks = count_blocks(
        [room.for_blocks(limits.max_num_seqs)], limits.useful_blocks, window_needs(costs, limits)
    ).num_blocks
    return blocks, room.num_states(limits.max_num_seqs)


def has_room(
    costs: HostCosts,
    layers: Mapping[str, float],
    limits: EngineLimits,
    demand: CacheDemand,
    *,
    is_first: bool,
    is_last: bool,
) -> bool:
    """Whether the KV cache and recurrent states of ``demand`` fit on a stage."""
    blocks, states = kv_room(costs, layers, limits, is_first=is_first, is_last=is_last)
    return blocks * limits.block_size >= demand.kv_tokens and states >= demand.num_seqs


def fits(stages: Sequence[Stage], limits: EngineLimits, demand: CacheDemand) -> bool:
    """Whether the KV cache and recurrent states of ``demand`` fit on every stage of a layout."""
    last = len(stages) - 1
    return all(
        has_room(stage.costs, stage.layers, limits, demand, is_first=number == 0, is_last=number == last)
        for number, stage in enumerate(stages)
    )


def kv_tokens(stages: Sequence[Stage], limits: EngineLimits) -> int:
    """KV tokens that fit on every stage of a layout in the stage's share of the machine's memory, counted as by the search."""
    last = len(stages) - 1
    return limits.block_size * min(
        kv_room(stage.costs, stage.layers, limits, is_first=number == 0, is_last=number == last)[0]
        for number, stage in enumerate(stages)
    )


Parts = tuple[tuple[float, StepShape], ...]
"""Steps of a workload, each with a weight (how often it runs)."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Cost of a layout, in seconds per request; lower is better.

    Seconds are summed over all stages and hops, and the slowest stage or link is found. The value is the larger of these two times,
    or their sum (``adds``).
    """

    path: Parts
    """Steps whose times are summed over all stages and all sends between stages."""
    bottleneck: Parts
    """Steps for which the slowest stage or link counts."""
    adds: bool
    """Whether the seconds of all stages and the seconds of the slowest stage are added; if not, the larger of the two counts."""
    scale: float = 1.0
    """Factor from the combined time to seconds per request."""
    num_seqs: int = 1
    """Number of concurrent sequences."""
    num_batches: int = 1
    """Number of micro-batches in flight."""
    num_stages: tuple[int, int] = (1, 1 << 30)
    """Minimum and maximum number of stages of the layouts that the criterion is for."""
    tokens_per_round: float = 0.0
    """Tokens generated in one round (a step of every micro-batch in flight); 0 for latency."""

    def value(self, total: float, most: float) -> float:
        return self.scale * (total + most if self.adds else max(total, most))

    def largest_bound(self, target: float, least_total: float) -> float:
        """Upper bound on the seconds that any stage or link may take in a layout whose value is below ``target`` and whose stages
        together take at least ``least_total`` seconds."""
        return target / self.scale - (least_total if self.adds else 0.0)

    def hop_seconds(self, sender: HostCosts, receiver: HostCosts, link: NetworkLink) -> float:
        """Seconds to send the activations of the steps in ``path``, each step times its weight, from stage ``sender`` to stage
        ``receiver``."""
        return sum(weight * link.seconds(sender.sent_bytes(shape.rows, receiver)) for weight, shape in self.path)

    def transfer_seconds(self, sender: HostCosts, receiver: HostCosts, link: NetworkLink) -> float:
        """Seconds for which ``link`` is busy with the activations of the steps in ``bottleneck``, each step times its weight."""
        rows = sum(weight * shape.rows for weight, shape in self.bottleneck)
        return sender.sent_bytes(rows, receiver) / link.bytes_per_second

    def return_seconds(self, link: NetworkLink) -> float:
        """Seconds for which sampled tokens travel from the last stage to the first."""
        return sum(weight for weight, _ in self.path) * link.latency

    def busy_share(self, stages: Sequence[Stage], number: int, value: float) -> float:
        """Fraction of the time in which stage ``number`` computes, in a layout of value ``value``."""
        parts = (*self.path, *self.bottleneck) if self.adds else self.bottleneck
        return self.scale * stage_seconds(parts, stages, number) / value

    def evaluate(self, stages: Sequence[Stage], cluster: Cluster) -> float:
        """Value of a layout with rank 0 on the first stage."""
        paths = [stage_seconds(self.path, stages, number) for number in range(len(stages))]
        most = max(stage_seconds(self.bottleneck, stages, number) for number in range(len(stages)))
        hops, transfer = self.route_seconds(stages, cluster)
        return self.value(sum(paths) + hops, max(most, transfer))

    def route_seconds(self, stages: Sequence[Stage], cluster: Cluster) -> tuple[float, float]:
        """Seconds of a layout's hops, with the return of tokens to the first stage, and the longest time for which a link is busy."""
        hops = transfer = 0.0
        for sender, receiver in itertools.pairwise(stages):
            link = cluster.link(sender.machine, receiver.machine)
            hops += self.hop_seconds(sender.costs, receiver.costs, link)
            transfer = max(transfer, self.transfer_seconds(sender.costs, receiver.costs, link))
        if len(stages) > 1:
            hops += self.return_seconds(cluster.link(stages[-1].machine, stages[0].machine))
        return hops, transfer


def stage_seconds(parts: Parts, stages: Sequence[Stage], number: int) -> float:
    """Weighted seconds of stage ``number`` for the steps in ``parts``."""
    stage = stages[number]
    ends = {"is_first": number == 0, "is_last": number == len(stages) - 1}
    return sum(weight * stage.costs.stage_seconds(shape, stage.layers, **ends) for weight, shape in parts)


def make_criteria(objective: str, request: MeanRequest, limits: EngineLimits, num_stages: int) -> Iterator[Criterion]:
    """Criteria for layouts of at most ``num_stages`` stages. The value of a layout is the least over the criteria that apply to its
    number of stages, if the layout's KV cache has room for their ``num_seqs``.

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
    """Criterion of throughput: time per request (s) at saturation, from one round (a step of every micro-batch). Some micro-batches
    carry prefill chunks in addition to their decodes, as often as needed for prompts to enter as fast as answers finish."""
    share = num_seqs / num_batches
    # A sequence in prefill does not decode; its prefill counts as one step.
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
    """Yield the kinds of steps in a round, each as its weight (how often it runs), prefill chunks, and number of chunks that sample
    a token.

    Args:
        decodes: decode tokens of each kind of step.
    """
    chunks = prompt_chunks(
        request.prompt,
        limits,
        num_stages=num_stages,
        num_batches=num_batches,
        num_decodes=decodes,
        others_wait=True,
    )
    prompts = decodes / request.output  # new prompts per step
    longer = max(0.0, request.prompt_context - request.prompt / 2)  # more tokens before a chunk if prompt lengths vary
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
    """Criterion of latency: seconds of one answer on an idle engine. Its prefill chunks are pipelined through the stages, then its
    output tokens pass through the stages one by one."""
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
