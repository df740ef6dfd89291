"""Response schemas of the routes under ``/v1/cluster``."""

from __future__ import annotations

from typing import Any, Literal

from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.server.link.frames import MachineLinkInfo, RankShardInfo


class RankPoint(ApiObject):
    """State of a rank at one time: busy fraction since the previous point (null for the first point), private memory of its
    process, and used and total memory of its device. Memory is in bytes."""

    rank: Count
    busy: float | None
    private_memory: Count
    memory_used: Count
    memory_total: Count


class Percentiles(ApiObject):
    """Median and 99th percentile of a latency, in seconds."""

    p50: float
    p99: float


class StatsPoint(ApiObject, kw_only=True):
    """Work of a model since the previous point of its history. Rates are per second. A point older than five minutes covers ten
    seconds."""

    time_us: Count
    """Time at which the statistics were taken, in microseconds since 1970."""
    seconds: float
    """Seconds that the rates of this point cover."""
    running: Count
    """Open requests with a sequence in the batches. ``running`` and ``waiting`` together are all open requests."""
    waiting: Count
    """Open requests that wait for admission, for tokenization, or for a place in a batch."""
    sequences: Count
    """Sequences in the batches, that is, with KV blocks; a request has one for each of its answers."""
    kv_usage: float
    """Fraction of the KV blocks in use."""
    ttft: Percentiles | None
    """Time to first token of the answers in the last minute; null if no answer had its first token in that minute."""
    time_per_output_token: Percentiles | None
    """Mean inter-token latency of the answers that ended in the last minute; null if none of them has two tokens."""
    queue_time: Percentiles | None
    """Time in the engine's waiting queue of answers that had their first token in the last minute; null if there were none."""
    prefix_cache_hit_rate: float | None
    """Fraction of the prompt tokens of the last minute that were prefix-cache hits; null if there were no prompts."""
    preemptions: Count
    """Preempted sequences in the last minute."""
    steps_per_second: float
    tokens_per_step: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    ranks: list[RankPoint]


class RankTraffic(ApiObject):
    """Traffic from one rank to another for a model: bytes sent in total, per second, and per step of the sending rank. The numbers
    per second and per step cover the last few seconds; they are null if the rank has reported only once, or ran no step."""

    source: Count
    destination: Count
    bytes_sent: Count
    bytes_per_second: float | None
    bytes_per_step: float | None


class StageLoad(ApiObject):
    """Load of a stage's busiest rank: busy fraction (of the time with work) and mean step time in seconds."""

    stage: Count
    busy: float
    step_seconds: float


class StageSpeed(ApiObject):
    """Speed of a stage over the last minute with work: mean step time of its slowest rank in seconds (measured); step time that the
    stage would have if its speed relative to the other stages were as after startup (expected); and the ratio of measured to
    expected. Expected and ratio are null until ``drift`` is known."""

    stage: Count
    rank: Count
    step_seconds: float
    predicted_seconds: float | None
    slowdown: float | None


class BottleneckReport(ApiObject, kw_only=True):
    """Bottleneck of a model's throughput, found in the last seconds with work.

    ``stage``: one stage computes much longer than the others. ``stages``: all stages compute nearly all the time. ``requests``:
    fewer sequences ran than there are stages. ``communication``: stage-to-stage latency is most of the busiest stage's idle time in a step.
    ``models``: the stages were idle while other models ran on the ranks. ``outside``: the stages wait for something else, such
    as scheduling.
    """

    time_us: Count
    """Time of the last stats that the report covers, in microseconds since 1970."""
    seconds: float
    """Seconds with work that the report covers."""
    bound: Literal["stage", "stages", "requests", "communication", "models", "outside"]
    stages: list[StageLoad]
    busiest: Count
    """Index of the busiest stage."""
    lead: float
    """Busy time of the busiest stage, as a multiple of the mean busy time of the other stages; 1 with a single stage."""
    move_to: Count | None
    """If ``bound`` is ``stage``: the least busy stage, to which a layer of the busiest stage could move. Otherwise null."""
    stage_latency_seconds: float | None
    """Latency in seconds of a message between two stages, measured at startup; null if it was not measured."""
    running: float | None
    """Mean number of running sequences; null if unknown."""
    full: Literal["kv_cache", "max_num_seqs"] | None
    """Full resource for which sequences wait: KV blocks or places in a batch; null if no sequences wait, or if neither is full."""


class LayoutDrift(ApiObject, kw_only=True):
    """Step times of the stages in the last ten seconds of work, relative to their step times after startup."""

    factors: list[float]
    """Relative slowdown of each stage: ratio of its step time to its step time after startup, divided by the median of this ratio
    over the other stages."""
    slow_stage: Count | None
    """Index of the stage that has slowed down relative to the other stages; null if none has."""
    slow_rank: Count | None
    """Slowest rank of ``slow_stage``; null without a slow stage."""
    better_layers: list[Count] | None
    """Number of layers of each stage in a layout that would have at least 15 % more throughput; null if there is none."""
    gain: float
    """Gain of throughput by ``better_layers``, as a fraction; 0 if that is null."""


class StatsEvent(StatsPoint, tag_field="object", tag="cluster.stats"):
    """Stream event: a ``StatsPoint`` with the current traffic between ranks, stage speeds, bottleneck and drift."""

    links: list[RankTraffic]
    stages: list[StageSpeed]
    """Speed of each stage; empty until the model has run steps."""
    bottleneck: BottleneckReport | None
    """Bottleneck report; null until the model has worked for some seconds."""
    drift: LayoutDrift | None
    """Step times of the stages relative to their step times after startup; null with a single stage, and until the model has worked
    for about twenty seconds."""


class StepSequence(ApiObject):
    """One sequence in a step: number of tokens that the step ran, number of earlier tokens of the sequence, and whether the
    sequence is decoding."""

    request: str
    tokens: Count
    context: Count
    decode: bool


class Step(ApiObject):
    """A completed step, and some of its sequences (the first 32)."""

    step: Count
    prefill_tokens: Count
    decode_tokens: Count
    num_sequences: Count
    sequences: list[StepSequence]


class RankTrace(ApiObject):
    """What a rank did, as trace slices (intervals of time): name, begin and end in microseconds since 1970, and step id (-1 outside
    of all steps)."""

    rank: Count
    slices: list[tuple[str, Count, Count, int]]


class TraceEvent(ApiObject, kw_only=True, tag_field="object", tag="cluster.steps"):
    """Stream event: steps and trace slices between ``begin_us`` and ``end_us`` (microseconds since 1970); both times are null if
    there are no slices."""

    begin_us: Count | None
    end_us: Count | None
    dropped: Count
    """Number of trace slices that were dropped because a buffer was full."""
    steps: list[Step]
    ranks: list[RankTrace]


class ClusterRank(RankShardInfo, kw_only=True):
    """Placement, device and shard of one rank of a model. A field is null until the rank has reported it."""

    threads: Count | None
    cpus: str | None
    """CPU cores in the affinity mask of the rank, in the format of ``taskset``."""


class LayerExperts(ApiObject):
    """Number of tokens routed to each expert of a layer since the engine started."""

    layer: Count
    tokens: list[Count]


class RankExpertReads(ApiObject):
    """Counters, since the engine started, of the expert cache of a rank with ``--expert-offload``."""

    rank: Count
    hits: Count
    """Number of expert cache hits."""
    misses: Count
    bytes_read: Count
    stall_seconds: float
    """Seconds in which computation waited until an expert was read."""


class ClusterInfo(ApiObject, kw_only=True, tag_field="object", tag="cluster"):
    """A model, its ranks, and its statistics of the last hour."""

    time_us: Count
    """Time at which the statistics were taken, in microseconds since 1970."""
    model: str
    num_layers: Count
    block_size: Count
    """Tokens per KV block."""
    num_blocks: Count
    num_window_blocks: Count
    """Number of window blocks, which only sliding-window layers use; 0 if these layers use ordinary KV blocks."""
    max_model_len: Count
    """Maximum context length, in tokens."""
    max_num_seqs: Count
    """Maximum sequences per batch."""
    pipeline_schedule: str
    plugins: list[str]
    """Name and digest of each plugin loaded by the ranks."""
    fingerprint: str
    """Digest of all that the answers depend on; responses have it as ``system_fingerprint``."""
    reproducible: bool
    """Whether models with equal fingerprints give bit-identical answers on every layout and in every batch."""
    stage_latency_seconds: float | None
    """Latency in seconds of a message between two stages, measured at startup; null if it was not measured."""
    ranks: list[ClusterRank]
    experts: list[LayerExperts]
    """Number of tokens routed to each expert, with one entry per MoE layer."""
    expert_reads: list[RankExpertReads]
    """Expert cache statistics; one entry per rank with ``--expert-offload``."""
    links: list[RankTraffic]
    stages: list[StageSpeed]
    """Speed of each stage; empty until the model has run steps."""
    machine_links: list[MachineLinkInfo]
    """Measured links between machines; empty if links were not measured."""
    plan: str | None
    """Table of the planned layout and its alternatives; null if the layout was not planned."""
    bottleneck: BottleneckReport | None
    """Bottleneck report; null until the model has worked for some seconds."""
    drift: LayoutDrift | None
    """Step times of the stages relative to their step times after startup; null with a single stage, and until the model has worked
    for about twenty seconds."""
    history: list[StatsPoint]
    """History of the statistics, oldest point first."""


class LayoutChanged(ApiObject, kw_only=True, tag_field="object", tag="cluster.layout"):
    """The layout of a model after a layout change, and the pause in seconds, 0 if the layout was already in use."""

    model: str
    changed: bool
    pause_seconds: float
    num_blocks: Count
    max_model_len: Count
    """Maximum context length, in tokens."""
    quantization: str
    """Quantization of the weights: one name for all stages, or one name per stage, separated by commas."""
    ranks: list[RankShardInfo]
    """Ranks that hold a shard of the model."""


class TraceFile(ApiObject):
    """A trace in Chrome's trace format, which Perfetto opens."""

    displayTimeUnit: Literal["ms"]
    traceEvents: list[dict[str, Any]]
