"""Stats of engines for the gateway: counters since they started, and what is so now.

The engine host sends an ``EngineStats`` when work comes to an idle engine, when the last work is done, about once a second
in between, and twice more at the end. So what was sent last is true until something happens, and a host that hangs shows in
its silence.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from labinfer.base.rank_stats import ExpertReads

STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of tokens in a step: vLLM's."""
NUM_STEP_BUCKETS = len(STEP_TOKEN_BUCKETS) + 1
"""The last one is for all that have more."""


def step_bucket(num_tokens: int) -> int:
    """Index into ``EngineStats.steps_by_tokens`` for a step that ran so many tokens."""
    return bisect_left(STEP_TOKEN_BUCKETS, num_tokens)


class RankStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Work of one rank for a model. Seconds and bytes; all but memory since the engine started."""

    rank: int
    stage: int
    tp_rank: int
    num_threads: int
    cpus: str
    """Cores it may run on, as ``taskset`` writes them."""
    num_steps: int = 0
    busy_seconds: float = 0.0
    """Inside the model, sampling included, waiting for other ranks excluded."""
    bubble_seconds: float = 0.0
    """The rest of the time in which the engine had work."""
    bytes_sent: dict[int, int] = {}
    """Bytes by the rank they went to."""
    private_memory: int = 0
    """Bytes of the rank's process now, without pages of mapped files; all its models together."""
    peak_memory: int = 0
    """Resident at most, pages of mapped files and an accelerator's memory included."""
    expert_tokens: dict[int, list[int]] = {}
    """Tokens that each expert of a layer was given, by layer; on the first tensor-parallel rank of a stage."""
    expert_reads: ExpertReads | None = None
    """None where all experts are in memory."""
    when: float = 0.0
    """Seconds by a clock of the rank that never goes back, at which these were read."""
    memory_total: int = 0
    """Bytes of the memory that the rank computes in: its accelerator's, or its machine's, within the container's limit."""
    memory_used: int = 0
    """Bytes of that in use now: an accelerator's by this rank, a machine's by all its processes."""


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step of a trace."""

    step_id: int
    num_tokens: int
    num_decodes: int
    num_sequences: int
    sequences: list[tuple[str, int, int, bool]]
    """Key of the request, tokens, tokens of the sequence before these, and whether one leads to the next; of the first
    sequences only where there are many."""


class Drift(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Stages' times against those of the start, over some seconds of work."""

    factors: list[float]
    """Time of each stage as a multiple of that at the start, over the median of the others' multiples: what all stages take longer
    is the requests'."""
    slow: int | None
    """Stage that has become slower than the others, if one has."""
    rank: int | None
    """The slowest one of its ranks."""
    layers: list[int]
    """Layers of each stage that would do better; empty where none would by much."""
    gain: float
    """Work that these would do more, as a fraction."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Queues and work of the engine of one model."""

    model: str
    """The name that requests use."""
    running: int = 0
    """Sequences that have KV blocks."""
    waiting: int = 0
    kv_usage: float = 0.0
    """Fraction of the KV blocks that are in use."""
    prefix_cache_queries: int = 0
    """Tokens of requests as they were admitted, when computed again once more."""
    prefix_cache_hits: int = 0
    """Number of these that were in the KV cache."""
    num_preemptions: int = 0
    """Sequences that lost their KV blocks to others, by recomputation and by swapping."""
    prompt_tokens: int = 0
    """Tokens of prompts that have been run through the model, those found in the KV cache included."""
    generation_tokens: int = 0
    num_steps: int = 0
    """Steps that came back."""
    step_age: float = 0.0
    """Seconds from when the last step came back, or from when work came to the idle engine, to when this was sent."""
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * NUM_STEP_BUCKETS)
    """Numbers of steps that ran so many tokens; see ``step_bucket``."""
    step_tokens: int = 0
    """Tokens of all steps."""
    ranks: list[RankStats] = []
    drift: Drift | None = None
    """None with one stage, and until there has been enough work."""
    num_drafts: int = 0
    """Drafts of a sequence that a step verified."""
    drafted_tokens: int = 0
    accepted_by_place: list[int] = []
    """Drafted tokens that were right, by their place in a draft."""
    draft_seconds: float = 0.0
    """Time of the drafter."""
    drafter_failures: int = 0
    num_swaps: int = 0
    """Preemptions that swapped the KV blocks to host memory."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return self.running + self.waiting > 0
