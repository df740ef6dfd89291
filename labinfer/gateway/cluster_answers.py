"""Answers of the routes under ``/v1/cluster``."""

from __future__ import annotations

from typing import Any, Literal

from labinfer.link.frames import RankFacts
from labinfer.openai.answer import Answer, Count


class RankPoint(Answer):
    """State of a rank at one time: the fraction of the time since the point before in which it computed (null where there is none
    before), and its memory in bytes."""

    rank: Count
    busy: float | None
    private_memory: Count


class StatsPoint(Answer, kw_only=True):
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


class StatsEvent(StatsPoint, tag_field="object", tag="cluster.stats"):
    """The same as an event."""


class StepSequence(Answer):
    """The part of a sequence in a step: tokens it ran, tokens before these, and whether one leads to the next."""

    request: str
    tokens: Count
    context: Count
    decode: bool


class Step(Answer):
    """A step that came back. Of many sequences only the first are named."""

    step: Count
    prefill_tokens: Count
    decode_tokens: Count
    num_sequences: Count
    sequences: list[StepSequence]


class RankTrace(Answer):
    """Slices of a rank: name, begin and end in microseconds since 1970, and step (-1 without one) of each slice."""

    rank: Count
    slices: list[tuple[str, Count, Count, int]]


class TraceEvent(Answer, kw_only=True, tag_field="object", tag="cluster.steps"):
    """Steps and slices of some time, in microseconds since 1970; null where there are no slices."""

    begin_us: Count | None
    end_us: Count | None
    dropped: Count
    """Slices there was no room for."""
    steps: list[Step]
    ranks: list[RankTrace]


class ClusterRank(RankFacts, kw_only=True):
    """Place, device and share of one rank in a model. Null is what it has not told yet."""

    threads: Count | None
    cpus: str | None
    """Cores it may run on, as ``taskset`` writes them."""
    quantization: str


class LayerExperts(Answer):
    """Tokens that each expert of a layer was given since the engine started."""

    layer: Count
    tokens: list[Count]


class RankExpertReads(Answer):
    """Uses of experts on a rank that keeps them in a file (``--expert-offload``) since the engine started."""

    rank: Count
    hits: Count
    """Uses that found their expert in memory."""
    misses: Count
    bytes_read: Count
    stall_seconds: float
    """Time in which nothing could be computed for want of an expert."""


class Cluster(Answer, kw_only=True, tag_field="object", tag="cluster"):
    """A model, its ranks, and how it did in the last minutes."""

    time_us: Count
    """Microseconds since 1970."""
    model: str
    num_layers: Count
    block_size: Count
    """Tokens of a KV block."""
    num_blocks: Count
    max_model_len: Count
    """Tokens."""
    pipeline_schedule: str
    ranks: list[ClusterRank]
    experts: list[LayerExperts]
    """One entry for each layer that has any."""
    expert_reads: list[RankExpertReads]
    """One entry for each rank that keeps experts in a file."""
    history: list[StatsPoint]
    """Oldest first."""


class TraceFile(Answer):
    """A trace in the format of Chrome's, which Perfetto opens."""

    displayTimeUnit: Literal["ms"]
    traceEvents: list[dict[str, Any]]
