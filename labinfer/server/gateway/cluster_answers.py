"""Answers of the routes under ``/v1/cluster``."""

from __future__ import annotations

from typing import Any, Literal

from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.server.link.frames import MachineLinkInfo, RankShardInfo


class RankPoint(ApiObject):
    """State of a rank at one time: the fraction of the time since the point before in which it computed (null where there is none
    before), the memory of its process, and how much is in use of all that its device has, in bytes."""

    rank: Count
    busy: float | None
    private_memory: Count
    memory_used: Count
    memory_total: Count


class StatsPoint(ApiObject, kw_only=True):
    """Work of a model since the point before. Rates are a second's."""

    time_us: Count
    """Microseconds since 1970."""
    running: Count
    """Sequences that have KV blocks."""
    waiting: Count
    kv_usage: float
    """Fraction of the KV blocks in use."""
    steps_per_second: float
    tokens_per_step: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    ranks: list[RankPoint]


class RankTraffic(ApiObject):
    """Bytes that one rank has sent to another for a model: in all, a second, and a step of the rank. The last two are over some
    seconds up to the last news of the rank; null where it has told once only, or ran no step."""

    source: Count
    destination: Count
    bytes_sent: Count
    bytes_per_second: float | None
    bytes_per_step: float | None


class StageLoad(ApiObject):
    """Work of the busiest rank of a stage: the fraction of the time with work in which it computed, and the mean seconds of its
    steps."""

    stage: Count
    busy: float
    step_seconds: float


class StageSpeed(ApiObject):
    """Mean seconds in which the slowest rank of a stage computed in a step, in the last minute with work; the seconds that it would take
    had it kept its speed relative to the other stages, and the first as a multiple of the second. The last two are null until
    ``drift`` is known."""

    stage: Count
    rank: Count
    step_seconds: float
    predicted_seconds: float | None
    slowdown: float | None


class BottleneckReport(ApiObject, kw_only=True):
    """The bottleneck of a model's speed, measured over the last seconds in which it had work.

    ``stage``: one stage computes much longer than the others. ``stages``: all stages compute nearly all the time. ``requests``:
    fewer sequences ran than there are stages. ``hops``: a hop takes most of the time that the busiest stage waits in a step.
    ``models``: the stages wait, and other models ran on the ranks meanwhile. ``outside``: the stages wait for something else, such
    as scheduling.
    """

    time_us: Count
    """Microseconds since 1970, of the last of these seconds."""
    seconds: float
    """Time with work that was measured."""
    bound: Literal["stage", "stages", "requests", "hops", "models", "outside"]
    stages: list[StageLoad]
    busiest: Count
    """Number of a stage."""
    lead: float
    """Time that it computes, as a multiple of the other stages' mean; 1 where there are no others."""
    move_to: Count | None
    """With ``stage``: the least busy one, where the busiest has a layer to give away."""
    hop_seconds: float | None
    """Time of a hop between two stages, measured at the start; null where it was not."""
    running: float | None
    """Sequences, on the mean; null where none was seen."""
    full: Literal["kv_cache", "max_num_seqs"] | None
    """Resource that keeps further sequences waiting; null where none wait, or nothing is full."""


class LayoutDrift(ApiObject, kw_only=True):
    """Stages' times against those of the start, over the last ten seconds of work."""

    factors: list[float]
    """Time of each stage as a multiple of that at the start, over the median of the others' multiples."""
    slow_stage: Count | None
    """Stage that has become slower than the others; null where none has."""
    slow_rank: Count | None
    """The slowest of its ranks."""
    better_layers: list[Count] | None
    """Layers of each stage that would do at least 15 % more; null where none would."""
    gain: float
    """Work that these would do more, as a fraction; 0 without them."""


class StatsEvent(StatsPoint, tag_field="object", tag="cluster.stats"):
    """The same as an event, with what is told of the present alone."""

    links: list[RankTraffic]
    stages: list[StageSpeed]
    """Empty until there has been work."""
    verdict: BottleneckReport | None
    """Null until there has been work for some seconds."""
    drift: LayoutDrift | None
    """Null with one stage, and until there has been work for some twenty seconds."""


class StepSequence(ApiObject):
    """The part of a sequence in a step: tokens it ran, tokens before these, and whether one leads to the next."""

    request: str
    tokens: Count
    context: Count
    decode: bool


class Step(ApiObject):
    """A step that came back. Of many sequences only the first are named."""

    step: Count
    prefill_tokens: Count
    decode_tokens: Count
    num_sequences: Count
    sequences: list[StepSequence]


class RankTrace(ApiObject):
    """Slices of a rank: name, begin and end in microseconds since 1970, and step (-1 without one) of each slice."""

    rank: Count
    slices: list[tuple[str, Count, Count, int]]


class TraceEvent(ApiObject, kw_only=True, tag_field="object", tag="cluster.steps"):
    """Steps and slices of some time, in microseconds since 1970; null where there are no slices."""

    begin_us: Count | None
    end_us: Count | None
    dropped: Count
    """Slices there was no room for."""
    steps: list[Step]
    ranks: list[RankTrace]


class ClusterRank(RankShardInfo, kw_only=True):
    """Place, device and share of one rank in a model. Null is what it has not told yet."""

    threads: Count | None
    cpus: str | None
    """Cores it may run on, as ``taskset`` writes them."""


class LayerExperts(ApiObject):
    """Tokens that each expert of a layer was given since the engine started."""

    layer: Count
    tokens: list[Count]


class RankExpertReads(ApiObject):
    """Uses of experts on a rank that keeps them in a file (``--expert-offload``) since the engine started."""

    rank: Count
    hits: Count
    """Uses that found their expert in memory."""
    misses: Count
    bytes_read: Count
    stall_seconds: float
    """Time in which nothing could be computed for want of an expert."""


class ClusterInfo(ApiObject, kw_only=True, tag_field="object", tag="cluster"):
    """A model, its ranks, and how it did in the last minutes."""

    time_us: Count
    """Microseconds since 1970."""
    model: str
    num_layers: Count
    block_size: Count
    """Tokens of a KV block."""
    num_blocks: Count
    num_window_blocks: Count
    """Blocks of the layers with a window; 0 where these hold all tokens as the others do."""
    max_model_len: Count
    """Tokens."""
    max_num_seqs: Count
    """Sequences that run at once."""
    pipeline_schedule: str
    plugins: list[str]
    """Name and digest of each plugin that the ranks have loaded."""
    hop_seconds: float | None
    """Time of a hop between two stages, measured at the start; null where it was not."""
    ranks: list[ClusterRank]
    experts: list[LayerExperts]
    """One entry for each layer that has any."""
    expert_reads: list[RankExpertReads]
    """One entry for each rank that keeps experts in a file."""
    links: list[RankTraffic]
    stages: list[StageSpeed]
    """Empty until there has been work."""
    machine_links: list[MachineLinkInfo]
    """Empty where they were not measured."""
    plan: str | None
    """The layout and its alternatives, as a table; null where the start was not planned."""
    verdict: BottleneckReport | None
    """Null until there has been work for some seconds."""
    drift: LayoutDrift | None
    """Null with one stage, and until there has been work for some twenty seconds."""
    history: list[StatsPoint]
    """Oldest first."""


class LayoutChanged(ApiObject, kw_only=True, tag_field="object", tag="cluster.layout"):
    """The layout in which a model is served now, and the seconds in which nothing ran: 0 where it was served so before."""

    model: str
    changed: bool
    pause_seconds: float
    num_blocks: Count
    max_model_len: Count
    """Tokens."""
    quantization: str
    """One name for all stages, or where they differ one for each, with commas between."""
    ranks: list[RankShardInfo]
    """Ranks that have a part of it."""


class TraceFile(ApiObject):
    """A trace in the format of Chrome's, which Perfetto opens."""

    displayTimeUnit: Literal["ms"]
    traceEvents: list[dict[str, Any]]
