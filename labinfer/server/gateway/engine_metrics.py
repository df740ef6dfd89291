"""EngineMetrics: the stats of engines as Prometheus metrics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from labinfer.base.rank_stats import ExpertReads
from labinfer.server.link.stats import STEP_TOKEN_BUCKETS, EngineStats, RankStats

MODEL_LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the metrics label ``engine``. In vLLM the label is the number of a data-parallel replica; LABInfer has one replica."""
RANK_LABELS = ("model_name", "rank", "stage", "tp_rank")
EXPERT_LABELS = ("model_name", "layer", "expert")
LINK_LABELS = ("model_name", "source", "destination")

GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Running sequences.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Waiting sequences.", lambda s: s.waiting),
    ("vllm:kv_cache_usage_perc", "KV cache usage as a fraction; 1 is full.", lambda s: s.kv_usage),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", lambda s: s.prefix_cache_queries),
    ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", lambda s: s.prefix_cache_hits),
    ("vllm:num_preemptions", "Preempted sequences.", lambda s: s.num_preemptions),
    ("vllm:prompt_tokens", "Prefilled prompt tokens.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda s: s.generation_tokens),
    ("vllm:spec_decode_num_drafts", "Verified drafts.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", lambda s: s.drafted_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", lambda s: sum(s.accepted_by_place)),
    ("labinfer:draft_seconds", "Time spent drafting.", lambda s: s.draft_seconds),
    ("labinfer:drafter_failures", "Drafters that failed and were switched off.", lambda s: s.drafter_failures),
    ("labinfer:num_swaps", "Preemptions that swapped KV blocks to host memory.", lambda s: s.num_swaps),
    ("labinfer:steps", "Completed engine steps.", lambda s: s.num_steps),
)
RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankStats], float]], ...] = (
    ("labinfer:rank_steps", "Steps run by a rank.", lambda r: r.num_steps),
    ("labinfer:stage_busy_seconds", "Compute time of a rank.", lambda r: r.busy_seconds),
    (
        "labinfer:stage_bubble_seconds",
        "Idle time of a rank while the engine had work (bubble).",
        lambda r: r.bubble_seconds,
    ),
)
RANK_GAUGES: tuple[tuple[str, str, Callable[[RankStats], float]], ...] = (
    (
        "labinfer:rank_private_memory_bytes",
        "Memory of a rank's process without mapped files, for all its models.",
        lambda r: r.private_memory,
    ),
    (
        "labinfer:rank_peak_memory_bytes",
        "Peak memory of a rank's process, including mapped files and accelerator memory.",
        lambda r: r.peak_memory,
    ),
)
READ_COUNTERS: tuple[tuple[str, str, Callable[[ExpertReads], float]], ...] = (
    ("labinfer:expert_hits", "Expert cache hits of a rank.", lambda e: e.hits),
    ("labinfer:expert_misses", "Expert cache misses of a rank.", lambda e: e.misses),
    ("labinfer:expert_read_bytes", "Bytes of experts that a rank read from disk.", lambda e: e.bytes_read),
    ("labinfer:expert_stall_seconds", "Time that a rank waited for experts to be read.", lambda e: e.stall_time),
)
"""Name, description and value of each counter that exists on ranks with ``--expert-offload``."""


class EngineMetrics(Collector):
    """Keeps the last stats of each engine, and converts them to Prometheus metrics at each scrape.

    Counters of a restarted engine begin at 0, as Prometheus expects.

    Args:
        model_names: names of the models; all metrics of a model are 0 until its first stats arrive.
        clock: monotonic time in seconds.
    """

    def __init__(self, model_names: Iterable[str], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        now = clock()
        self._last = {model: (EngineStats(model=model), now) for model in model_names}

    def update(self, stats: EngineStats) -> None:
        assert stats.model in self._last, f"unknown engine {stats.model}"
        self._last[stats.model] = (stats, self._clock())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        engines = [stats for stats, _ in self._last.values()]
        models = [((stats.model, ENGINE), stats) for stats in engines]
        ranks = [
            ((stats.model, str(rank.rank), str(rank.stage), str(rank.tp_rank)), rank)
            for stats in engines
            for rank in stats.ranks
        ]
        reads = [(labels, rank.expert_reads) for labels, rank in ranks if rank.expert_reads is not None]
        for family, table, labels, sources in (
            (GaugeMetricFamily, GAUGES, MODEL_LABELS, models),
            (CounterMetricFamily, COUNTERS, MODEL_LABELS, models),
            (CounterMetricFamily, RANK_COUNTERS, RANK_LABELS, ranks),
            (GaugeMetricFamily, RANK_GAUGES, RANK_LABELS, ranks),
            (CounterMetricFamily, READ_COUNTERS, RANK_LABELS, reads),
        ):
            for name, text, read in table:
                metric = family(name, text, labels=labels)
                for values, source in sources:
                    metric.add_metric(values, read(source))
                yield metric
        yield self._accepted(engines)
        yield self._step_tokens(engines)
        yield self._step_age()
        yield self._links(engines)
        yield self._experts(engines)
        yield self._energy(ranks)

    def _accepted(self, engines: list[EngineStats]) -> Metric:
        metric = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            labels=(*MODEL_LABELS, "position"),
        )
        for stats in engines:
            for place, count in enumerate(stats.accepted_by_place):
                metric.add_metric((stats.model, ENGINE, str(place)), count)
        return metric

    def _step_tokens(self, engines: list[EngineStats]) -> Metric:
        metric = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per step.", labels=MODEL_LABELS)
        bounds = [*map(str, map(float, STEP_TOKEN_BUCKETS)), "+Inf"]
        for stats in engines:
            up_to = itertools.accumulate(stats.steps_by_tokens)
            metric.add_metric((stats.model, ENGINE), list(zip(bounds, up_to, strict=True)), stats.step_tokens)
        return metric

    def _step_age(self) -> Metric:
        """Metric: seconds since the last completed step. It keeps growing if the engine host hangs in a step and sends no stats."""
        metric = GaugeMetricFamily(
            "labinfer:step_age_seconds",
            "Time since the last completed step while there is work, at the resolution of the engine's reports.",
            labels=MODEL_LABELS,
        )
        now = self._clock()
        for stats, received in self._last.values():
            age = stats.step_age + now - received if stats.has_work else 0.0
            metric.add_metric((stats.model, ENGINE), age)
        return metric

    def _links(self, engines: list[EngineStats]) -> Metric:
        metric = CounterMetricFamily("labinfer:link_bytes", "Bytes sent from one rank to another.", labels=LINK_LABELS)
        for stats in engines:
            for rank in stats.ranks:
                for destination, num_bytes in rank.bytes_sent.items():
                    metric.add_metric((stats.model, str(rank.rank), str(destination)), num_bytes)
        return metric

    def _energy(self, ranks: list[tuple[tuple[str, ...], RankStats]]) -> Metric:
        metric = CounterMetricFamily(
            "labinfer:energy_joules",
            "Energy of a CPU package, its DRAM or an accelerator, for all models; no sample if it is not measured.",
            labels=(*RANK_LABELS, "counter"),
        )
        for values, rank in ranks:
            for name, joules in rank.energy.items():
                metric.add_metric((*values, name), joules)
        return metric

    def _experts(self, engines: list[EngineStats]) -> Metric:
        metric = CounterMetricFamily(
            "labinfer:expert_tokens", "Tokens routed to an expert of a layer.", labels=EXPERT_LABELS
        )
        for stats in engines:
            loads = (item for rank in stats.ranks for item in rank.expert_tokens.items())
            for layer, counts in sorted(loads):
                for expert, count in enumerate(counts):
                    metric.add_metric((stats.model, str(layer), str(expert)), count)
        return metric
