"""Percentiles of the last minute."""

from __future__ import annotations

from labinfer.server.gateway.metrics import Metrics
from labinfer.server.gateway.recent_latencies import MAX_SAMPLES, WINDOW_SECONDS, LatencyWindow


def test_percentiles_are_samples_by_nearest_rank(clock):
    window = LatencyWindow(clock)
    assert window.percentiles() is None
    window.add(3.0)
    assert (window.percentiles().p50, window.percentiles().p99) == (3.0, 3.0)
    for number in range(100, 0, -1):
        window.add(number / 1000)
    assert (window.percentiles().p50, window.percentiles().p99) == (0.051, 0.1)


def test_samples_leave_the_window_by_age_and_by_number(clock):
    window = LatencyWindow(clock)
    window.add(9.0)
    clock.now += WINDOW_SECONDS - 1
    window.add(1.0)
    assert window.percentiles().p99 == 9.0
    clock.now += 2
    assert window.percentiles().p99 == 1.0
    for _ in range(MAX_SAMPLES):
        window.add(2.0)
    assert window.percentiles().p50 == 2.0
    clock.now += WINDOW_SECONDS + 1
    assert window.percentiles() is None


def test_metrics_record_the_latencies_of_each_model(clock):
    metrics = Metrics(["a", "b"], 100, clock)
    metrics.first_token("a", 0.5, 0.2)
    metrics.first_token("a", 0.7)
    ended = {"prompt_tokens": 3, "e2e_seconds": 1.5, "queue_seconds": 0.2, "first_token_seconds": 0.5}
    metrics.finished("a", "stop", generated=5, **ended)
    metrics.finished("a", "stop", generated=1, **ended)
    metrics.finished("a", "abort", generated=50, **ended)
    recent = metrics.recent
    assert (recent.ttft["a"].percentiles().p50, recent.ttft["a"].percentiles().p99) == (0.5, 0.7)
    assert recent.queue_time["a"].percentiles().p99 == 0.2
    assert recent.time_per_output_token["a"].percentiles().p99 == 0.25, "of a complete answer with several tokens"
    assert recent.ttft["b"].percentiles() is None
