"""Statistics (stats) of engines for the gateway: counters since the start of the engine, and current values.

The engine host sends an ``EngineStats`` when an idle engine gets work, about once a second while there is work, when the work ends,
and twice after that. The last stats therefore stay valid while the engine is idle. If no stats arrive although the engine has work,
the host hangs.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from labinfer.base.rank_stats import ExpertReads

STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of tokens per step, as in vLLM."""
NUM_STEP_BUCKETS = len(STEP_TOKEN_BUCKETS) + 1
"""Number of buckets, including the last one, which has no upper bound."""


def step_bucket(num_tokens: int) -> int:
    """Index into ``EngineStats.steps_by_tokens``, a histogram, for a step with ``num_tokens``."""
    return bisect_left(STEP_TOKEN_BUCKETS, num_tokens)


class RankStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Work of one rank for a model, in seconds and bytes. Counters begin at the start of the engine; memory is the current use."""

    rank: int
    stage: int
    tp_rank: int
    num_threads: int
    cpus: str
    """CPU cores in the rank's affinity mask, in the format of ``taskset``."""
    num_steps: int = 0
    busy_seconds: float = 0.0
    """Seconds in which the rank ran the model, including sampling, without waits for other ranks."""
    bubble_seconds: float = 0.0
    """Pipeline bubble: seconds in which the rank idled while the engine had work."""
    bytes_sent: dict[int, int] = {}
    """Bytes of activations and tokens sent to each rank."""
    private_memory: int = 0
    """Current private memory of the rank's process (without mapped files), for all models together."""
    peak_memory: int = 0
    """Peak resident memory, including mapped files and an accelerator's memory."""
    expert_tokens: dict[int, list[int]] = {}
    """Number of tokens routed to each expert, by layer. Only the first tensor-parallel rank of a stage reports it."""
    expert_reads: ExpertReads | None = None
    """Expert cache hits and reads; None if all experts are in memory."""
    when: float = 0.0
    """Time at which the rank took these stats, in seconds of its monotonic clock."""
    memory_total: int = 0
    """Total memory of the rank's device: memory of the accelerator, or of the machine within the container's limit."""
    memory_used: int = 0
    """Used part of ``memory_total``: used by this rank on an accelerator, by all processes on a machine."""
    energy: dict[str, float] = {}
    """Joules by name of the energy counters that this rank reads. A counter is for a whole CPU package or accelerator, including
    idle times."""


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A completed step, as a trace shows it."""

    step_id: int
    num_tokens: int
    num_decodes: int
    num_sequences: int
    sequences: list[tuple[str, int, int, bool]]
    """The first sequences of the step, as (request key, number of tokens run, number of earlier tokens, whether the sequence
    decodes)."""


class Drift(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Change of each stage's step time since startup, over some seconds of work."""

    factors: list[float]
    """Relative slowdown of each stage: ratio of its step time to its step time after startup, divided by the median of this ratio
    over the other stages. The division removes slowdowns of all stages, which the requests cause."""
    slow: int | None
    """Index of the stage that has slowed down relative to the other stages; None if none has."""
    rank: int | None
    """Slowest rank of the stage ``slow``; None without a slow stage."""
    layers: list[int]
    """Number of layers of each stage in a better split of the layers; empty if no split gains enough throughput."""
    gain: float
    """Gain of throughput by ``layers``, as a fraction."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Queue lengths and work of one model's engine."""

    model: str
    """Served name of the model."""
    running: int = 0
    """Sequences in the batches, that is, with KV blocks."""
    waiting: int = 0
    """Sequences that wait for KV blocks or a place in a batch."""
    running_keys: list[str] = []
    """Keys of the requests that have running sequences."""
    kv_usage: float = 0.0
    """Fraction of the KV blocks in use."""
    prefix_cache_queries: int = 0
    """Number of tokens that were looked up in the prefix cache when sequences were admitted. The tokens of a preempted sequence
    count again."""
    prefix_cache_hits: int = 0
    """Number of tokens, of ``prefix_cache_queries``, that were found in the prefix cache."""
    num_preemptions: int = 0
    """Number of preemptions, by recomputation or swapping."""
    prompt_tokens: int = 0
    """Number of prompt tokens processed, including prefix-cache hits."""
    generation_tokens: int = 0
    num_steps: int = 0
    """Number of completed steps."""
    step_age: float = 0.0
    """Seconds since the last completed step or, if later, since the idle engine got work."""
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * NUM_STEP_BUCKETS)
    """Histogram of tokens per step; see ``step_bucket``."""
    step_tokens: int = 0
    """Total number of tokens of all steps."""
    ranks: list[RankStats] = []
    drift: Drift | None = None
    """Step times of the stages relative to their step times after startup; None with a single stage, and until there has been
    enough work."""
    num_drafts: int = 0
    """Number of verified drafts; a draft is for one sequence and one step."""
    drafted_tokens: int = 0
    accepted_by_place: list[int] = []
    """Number of accepted drafted tokens by position in the draft."""
    draft_seconds: float = 0.0
    """Seconds in which the drafter ran."""
    drafter_failures: int = 0
    num_swaps: int = 0
    """Number of preemptions that swapped KV blocks to host memory."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return self.running + self.waiting > 0
