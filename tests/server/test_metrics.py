"""Metrics: vLLM's names, labels and buckets, what counts into them, and what engines report."""

from __future__ import annotations

import time

import msgspec
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from labinfer.base.rank_stats import ExpertReads
from labinfer.server.gateway.metrics import Metrics, length_buckets
from labinfer.server.link.stats import NUM_STEP_BUCKETS, STEP_TOKEN_BUCKETS, EngineStats, RankStats, step_bucket

A = {"model_name": "a", "engine": "0"}
B = {"model_name": "b", "engine": "0"}


@pytest.fixture
def metrics(clock) -> Metrics:
    return Metrics(["a", "b"], 1000, clock)


class Page:
    """What a scrape has, as Prometheus reads it."""

    def __init__(self, metrics: Metrics):
        body, self.content_type = metrics.render()
        self.families = {family.name: family for family in text_string_to_metric_families(body.decode())}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, labels: dict[str, str]) -> float:
        return self.samples[name, frozenset(labels.items())]

    def has(self, name: str, labels: dict[str, str]) -> bool:
        return (name, frozenset(labels.items())) in self.samples

    def bounds(self, name: str) -> list[float]:
        labels = {key: value for key, value in self.families[name].samples[0].labels.items() if key != "le"}
        buckets = [s for s in self.families[name].samples if s.name == f"{name}_bucket"]
        return [float(s.labels["le"]) for s in buckets if labels.items() <= s.labels.items()]


VLLM_FAMILIES = {  # without the _total that counters have in the text
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


def test_names_types_and_labels_are_those_of_vllm(metrics):
    page = Page(metrics)
    found = {name: family.type for name, family in page.families.items() if name.startswith("vllm:")}
    assert {name: kind for name, kind in found.items() if not name.endswith("_created")} == VLLM_FAMILIES
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert not page.families[by_position].samples  # no draft yet
    for name in VLLM_FAMILIES.keys() - {by_position}:
        labels = {label for sample in page.families[name].samples for label in sample.labels}
        extra = {"vllm:request_success": {"finished_reason"}}.get(name, set())
        assert labels - {"le"} == {"model_name", "engine"} | extra, name


def test_buckets_are_those_of_vllm(metrics):
    page, infinity = Page(metrics), float("inf")
    assert page.bounds("vllm:time_to_first_token_seconds") == [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
        2560, infinity,
    ]  # fmt: skip
    token = [
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, infinity,
    ]  # fmt: skip
    assert page.bounds("vllm:inter_token_latency_seconds") == token
    assert page.bounds("vllm:request_time_per_output_token_seconds") == token
    for part in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert page.bounds(f"vllm:{part}_seconds") == [
            0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, infinity,
        ]  # fmt: skip
    powers = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, infinity]
    assert page.bounds("vllm:iteration_tokens_total") == powers
    lengths = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, infinity]
    assert page.bounds("vllm:request_prompt_tokens") == page.bounds("vllm:request_generation_tokens") == lengths


@pytest.mark.parametrize(("longest", "buckets"), [(1, [1]), (4, [1, 2]), (10, [1, 2, 5, 10]), (49, [1, 2, 5, 10, 20])])
def test_lengths_end_with_the_longest(longest, buckets):
    assert length_buckets(longest) == buckets


def test_before_anything_happens_every_series_is_there_at_zero(metrics):
    page = Page(metrics)
    for labels in (A, B):
        for name in ("vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_count"):
            assert page.value(name, labels) == 0
        for reason in ("stop", "length", "abort", "error"):
            assert page.value("vllm:request_success_total", labels | {"finished_reason": reason}) == 0
    assert page.content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_times_count_for_their_model_and_in_their_bucket(metrics):
    metrics.first_token("a", 0.03)
    for seconds in (0.011, 0.02, 0.3):
        metrics.inter_token("a", seconds)
    page = Page(metrics)
    name = "vllm:time_to_first_token_seconds"
    assert page.value(f"{name}_count", A) == 1 and page.value(f"{name}_count", B) == 0
    assert page.value(f"{name}_bucket", A | {"le": "0.02"}) == 0
    assert page.value(f"{name}_bucket", A | {"le": "0.04"}) == 1
    name = "vllm:inter_token_latency_seconds"
    assert page.value(f"{name}_sum", A) == pytest.approx(0.331)
    assert page.value(f"{name}_bucket", A | {"le": "0.025"}) == 2
    assert page.value(f"{name}_bucket", A | {"le": "0.3"}) == 3  # a bound belongs to its bucket


def test_finished_answer_counts_with_all_its_times(metrics):
    metrics.finished(
        "b", "stop", prompt_tokens=40, generated=11, e2e_seconds=3.0, queue_seconds=0.5, first_token_seconds=1.0
    )
    page = Page(metrics)
    assert page.value("vllm:request_success_total", B | {"finished_reason": "stop"}) == 1
    for name, value in {
        "request_prompt_tokens": 40,
        "request_generation_tokens": 11,
        "e2e_request_latency_seconds": 3.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_time_per_output_token_seconds": 0.2,
    }.items():
        assert page.value(f"vllm:{name}_count", B) == 1, name
        assert page.value(f"vllm:{name}_sum", B) == pytest.approx(value), name
        assert page.value(f"vllm:{name}_count", A) == 0


def test_what_is_not_known_is_not_counted(metrics):
    metrics.finished("a", "length", prompt_tokens=40, generated=1, e2e_seconds=3.0)
    metrics.finished("a", "length", prompt_tokens=40, generated=1, e2e_seconds=3.0, first_token_seconds=3.0)
    page = Page(metrics)
    counts = {
        name: page.value(f"vllm:{name}_count", A)
        for name in (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_time_per_output_token_seconds",
        )
    }
    assert list(counts.values()) == [2, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_answer_that_was_cut_off_counts_but_its_times_do_not(metrics, reason):
    metrics.finished(
        "a",
        reason,
        prompt_tokens=40,
        generated=11,
        e2e_seconds=3.0,
        queue_seconds=0.5,
        first_token_seconds=1.0,
    )
    page = Page(metrics)
    assert page.value("vllm:request_success_total", A | {"finished_reason": reason}) == 1
    assert page.value("vllm:e2e_request_latency_seconds_count", A) == 0
    assert page.value("vllm:request_generation_tokens_count", A) == 0


def steps(*sizes: int) -> list[int]:
    counts = [0] * NUM_STEP_BUCKETS
    for size in sizes:
        counts[step_bucket(size)] += 1
    return counts


STATS = EngineStats(
    model="a",
    running=3,
    waiting=2,
    kv_usage=0.25,
    prefix_cache_queries=100,
    prefix_cache_hits=60,
    num_preemptions=4,
    num_swaps=1,
    prompt_tokens=500,
    generation_tokens=70,
    num_steps=4,
    step_age=0.125,
    steps_by_tokens=steps(1, 8, 9, 20_000),
    step_tokens=20_018,
    ranks=[
        RankStats(
            rank=0,
            stage=0,
            tp_rank=0,
            num_threads=1,
            cpus="0",
            num_steps=4,
            busy_seconds=1.5,
            bubble_seconds=0.5,
            bytes_sent={1: 4096},
            private_memory=1 << 20,
            peak_memory=1 << 22,
            expert_tokens={3: [0, 7], 1: [5, 2]},
            expert_reads=ExpertReads(hits=30, misses=10, bytes_read=4000, stall_time=0.25),
            energy={"package-0": 12.5, "package-0 dram": 2.25},
        ),
        RankStats(
            rank=1,
            stage=1,
            tp_rank=0,
            num_threads=1,
            cpus="1",
            num_steps=4,
            busy_seconds=1.25,
            bubble_seconds=0.75,
            bytes_sent={0: 64},
            private_memory=1 << 21,
            peak_memory=1 << 23,
        ),
    ],
)


def test_what_an_engine_reports_is_what_a_scrape_has(metrics):
    metrics.update_engine(STATS)
    page = Page(metrics)
    for name, value in {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 60,
        "vllm:num_preemptions_total": 4,
        "vllm:prompt_tokens_total": 500,
        "vllm:generation_tokens_total": 70,
        "labinfer:num_swaps_total": 1,
        "labinfer:steps_total": 4,
        "vllm:iteration_tokens_total_count": 4,
        "vllm:iteration_tokens_total_sum": 20_018,
    }.items():
        assert page.value(name, A) == value, name
        assert page.value(name, B) == 0, name
    for bound, count in (("1.0", 1), ("8.0", 2), ("16.0", 3), ("16384.0", 3), ("+Inf", 4)):
        assert page.value("vllm:iteration_tokens_total_bucket", A | {"le": bound}) == count


def test_pipeline_is_shown_by_rank_and_link(metrics):
    metrics.update_engine(STATS)
    page = Page(metrics)
    last = {"model_name": "a", "rank": "1", "stage": "1", "tp_rank": "0"}
    for name, value in {
        "rank_steps_total": 4,
        "stage_busy_seconds_total": 1.25,
        "stage_bubble_seconds_total": 0.75,
        "rank_private_memory_bytes": 1 << 21,
        "rank_peak_memory_bytes": 1 << 23,
    }.items():
        assert page.value(f"labinfer:{name}", last) == value, name
    link = {"model_name": "a", "source": "0", "destination": "1"}
    assert page.value("labinfer:link_bytes_total", link) == 4096
    assert page.value("labinfer:link_bytes_total", link | {"source": "1", "destination": "0"}) == 64


def test_energy_is_shown_where_it_is_measured(metrics):
    metrics.update_engine(STATS)
    page = Page(metrics)
    labels = {"model_name": "a", "rank": "0", "stage": "0", "tp_rank": "0"}
    samples = {
        frozenset({**labels, "counter": counter}.items()): joules
        for counter, joules in {"package-0": 12.5, "package-0 dram": 2.25}.items()
    }
    assert samples == {
        found: value for (name, found), value in page.samples.items() if name == "labinfer:energy_joules_total"
    }


def test_tokens_of_each_expert_are_shown_by_layer(metrics):
    metrics.update_engine(STATS)
    page = Page(metrics)
    for layer, expert, count in (("3", "0", 0), ("3", "1", 7), ("1", "0", 5)):
        labels = {"model_name": "a", "layer": layer, "expert": expert}
        assert page.value("labinfer:expert_tokens_total", labels) == count


def test_experts_in_a_file_are_counted_where_they_are(metrics):
    metrics.update_engine(STATS)
    page = Page(metrics)
    first = {"model_name": "a", "rank": "0", "stage": "0", "tp_rank": "0"}
    for name, value in {"hits": 30, "misses": 10, "read_bytes": 4000, "stall_seconds": 0.25}.items():
        assert page.value(f"labinfer:expert_{name}_total", first) == value, name
        assert not page.has(f"labinfer:expert_{name}_total", first | {"rank": "1", "stage": "1"}), name


def test_age_of_a_step_grows_while_there_is_work_and_no_report(metrics, clock):
    assert Page(metrics).value("labinfer:step_age_seconds", A) == 0
    clock.now += 50
    assert Page(metrics).value("labinfer:step_age_seconds", A) == 0  # idle
    metrics.update_engine(STATS)
    assert Page(metrics).value("labinfer:step_age_seconds", A) == 0.125
    clock.now += 30
    page = Page(metrics)
    assert page.value("labinfer:step_age_seconds", A) == pytest.approx(30.125)
    assert page.value("labinfer:step_age_seconds", B) == 0
    metrics.update_engine(msgspec.structs.replace(STATS, running=0, waiting=1, step_age=0.5))
    assert Page(metrics).value("labinfer:step_age_seconds", A) == 0.5
    metrics.update_engine(msgspec.structs.replace(STATS, running=0, waiting=0, step_age=0.5))
    clock.now += 30
    assert Page(metrics).value("labinfer:step_age_seconds", A) == 0


def test_engine_that_starts_anew_counts_from_zero(metrics):
    metrics.update_engine(STATS)
    metrics.update_engine(EngineStats(model="a", prompt_tokens=5))
    page = Page(metrics)
    assert page.value("vllm:prompt_tokens_total", A) == 5
    assert not [name for name, _ in page.samples if name == "labinfer:link_bytes_total"]


def test_engine_nobody_knows_is_a_mistake(metrics):
    with pytest.raises(AssertionError):
        metrics.update_engine(EngineStats(model="c"))


def test_http_requests_count_by_route_and_status(metrics):
    for status, seconds in ((200, 0.02), (200, 0.4), (429, 0.001)):
        metrics.http("/v1/completions", status, seconds)
    page = Page(metrics)
    route = {"route": "/v1/completions"}
    assert page.value("labinfer:http_requests_total", route | {"status": "200"}) == 2
    assert page.value("labinfer:http_requests_total", route | {"status": "429"}) == 1
    assert page.value("labinfer:http_request_seconds_count", route) == 3
    assert page.value("labinfer:http_request_seconds_bucket", route | {"le": "0.005"}) == 1


def test_connections_are_counted_when_they_are_asked_for(metrics):
    connections = {1, 2}
    metrics.watch_connections(lambda: len(connections))
    connections.add(3)
    assert Page(metrics).value("labinfer:open_connections", {}) == 3


def test_global_registry_is_left_alone_and_gateways_share_nothing(metrics):
    other = Metrics(["a"], 1000)
    other.first_token("a", 1.0)
    assert Page(metrics).value("vllm:time_to_first_token_seconds_count", A) == 0
    names = [family.name for family in prometheus_client.REGISTRY.collect()]
    assert not [name for name in names if name.startswith(("vllm:", "labinfer:"))]


def test_names_of_models_may_hold_anything():
    name = 'a "quoted"\\\nname'
    metrics = Metrics([name], 10)
    metrics.first_token(name, 1.0)
    labels = {"model_name": name, "engine": "0"}
    assert Page(metrics).value("vllm:time_to_first_token_seconds_count", labels) == 1


def test_steps_fall_into_the_buckets_that_prometheus_means():
    assert [step_bucket(size) for size in (0, 1, 2, 8, 9, 16384, 16385)] == [0, 0, 1, 1, 2, 12, 13]
    assert len(STEP_TOKEN_BUCKETS) + 1 == NUM_STEP_BUCKETS == len(EngineStats(model="a").steps_by_tokens)
    assert EngineStats(model="a").steps_by_tokens is not EngineStats(model="a").steps_by_tokens


def test_stats_travel_as_plain_lists():
    data = msgspec.msgpack.encode(STATS)
    assert msgspec.msgpack.decode(data, type=EngineStats) == STATS
    assert msgspec.msgpack.decode(data, strict=False)[:3] == ["a", 3, 2]


@pytest.mark.timing
def test_token_costs_microseconds():
    """Of the gateway's 2 ms for each token, its metrics take next to nothing."""
    metrics, rounds = Metrics(["a"], 32768), 5000
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(rounds):
            metrics.inter_token("a", 0.03)
        best = min(best, (time.perf_counter() - begin) / rounds)
    assert best < 5e-6
