"""Metrics of the gateway, and the text of ``/metrics``.

``vllm:`` metrics have the names, labels and buckets of vLLM's V1 engine (its ``vllm/v1/metrics/loggers.py``, and "Production
Metrics" in its documentation), so that dashboards made for vLLM work. Metrics called ``labinfer:`` exist only in LABInfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from labinfer.server.gateway.engine_metrics import ENGINE, MODEL_LABELS, EngineMetrics
from labinfer.server.gateway.recent_latencies import RecentLatencies
from labinfer.server.link.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format. Newer versions of the format differ only in names that these metrics do not have, and
old scrapers reject newer versions."""
FINISH_REASONS = ("stop", "length", "abort", "error")
COMPLETE = ("stop", "length")
"""Finish reasons of complete answers. Histograms of times count only complete answers: the time of any other answer says when a
client gave up."""
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """All metrics of a gateway, in its own registry.

    Label values are fixed at the start, except HTTP routes and statuses, so that requests cannot create new time series.

    Args:
        model_names: names of the served models.
        max_model_len: maximum context length of all models, and upper end of the histograms of lengths.
        clock: monotonic time in seconds.
    """

    def __init__(self, model_names: Iterable[str], max_model_len: int, clock: Callable[[], float] = time.monotonic):
        self._model_names = tuple(model_names)
        self._registry = CollectorRegistry()
        self._engines = EngineMetrics(self._model_names, clock)
        self._registry.register(self._engines)
        self.recent = RecentLatencies(self._model_names, clock)
        """Latencies of the last minute, for ``/v1/cluster``."""
        lengths = length_buckets(max_model_len)
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._answer_tokens = self._histogram("vllm:request_generation_tokens", "Output tokens per request.", lengths)
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token (TTFT).", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram("vllm:inter_token_latency_seconds", "Inter-token latency.", TOKEN_BUCKETS)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token (TPOT) of a request.",
            TOKEN_BUCKETS,
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "End-to-end request latency.", REQUEST_BUCKETS)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds",
            "Time in the queue of the engine.",
            REQUEST_BUCKETS,
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Prefill time: from arrival to the first token, without the queue; includes the gateway's work.",
            REQUEST_BUCKETS,
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "Decode time: from the first to the last token.", REQUEST_BUCKETS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds",
            "Inference time: from arrival to the end, without the queue.",
            REQUEST_BUCKETS,
        )
        success = Counter(
            "vllm:request_success",
            "Finished outputs by finish reason.",
            (*MODEL_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._success = {
            (model, reason): success.labels(model, ENGINE, reason)
            for model in self._model_names
            for reason in FINISH_REASONS
        }
        self._http_requests = Counter(
            "labinfer:http_requests", "Finished HTTP requests.", ("route", "status"), registry=self._registry
        )
        self._http_seconds = Histogram(
            "labinfer:http_request_seconds",
            "HTTP request latency, from its headers to the end of the response.",
            ("route",),
            buckets=HTTP_BUCKETS,
            registry=self._registry,
        )
        self._connections = Gauge("labinfer:open_connections", "Open connections.", registry=self._registry)

    def first_token(self, model: str, seconds: float, queue_seconds: float | None = None) -> None:
        """Record the time to first token of an answer.

        Args:
            queue_seconds: part of ``seconds`` in the engine's waiting queue; None if unknown.
        """
        self._first_token[model].observe(seconds)
        self.recent.ttft[model].add(seconds)
        if queue_seconds is not None:
            self.recent.queue_time[model].add(queue_seconds)

    def inter_token(self, model: str, seconds: float) -> None:
        """Record an inter-token latency of ``seconds``. The gateway calls it for every token."""
        self._inter_token[model].observe(seconds)

    def finished(
        self,
        model: str,
        reason: str,
        *,
        prompt_tokens: int,
        generated: int,
        e2e_seconds: float,
        queue_seconds: float | None = None,
        first_token_seconds: float | None = None,
    ) -> None:
        """Record a finished answer. As in vLLM, each answer of a request counts.

        Args:
            reason: finish reason, one of ``FINISH_REASONS``.
            generated: output tokens of the answer.
            e2e_seconds: seconds from the arrival of the request to the end of the answer.
            queue_seconds: time in the engine's waiting queue; None if unknown.
            first_token_seconds: seconds from the arrival of the request to the first token of the answer; None without a token.
        """
        self._success[model, reason].inc()
        if reason not in COMPLETE:
            return
        self._prompt_tokens[model].observe(prompt_tokens)
        self._answer_tokens[model].observe(generated)
        self._e2e[model].observe(e2e_seconds)
        if queue_seconds is not None:
            self._queue[model].observe(queue_seconds)
            self._inference[model].observe(max(0.0, e2e_seconds - queue_seconds))
        if first_token_seconds is not None:
            decode = max(0.0, e2e_seconds - first_token_seconds)
            self._decode[model].observe(decode)
            if generated > 1:
                self._per_token[model].observe(decode / (generated - 1))
                self.recent.time_per_output_token[model].add(decode / (generated - 1))
            if queue_seconds is not None:
                self._prefill[model].observe(max(0.0, first_token_seconds - queue_seconds))

    def update_engine(self, stats: EngineStats) -> None:
        """Store the latest stats of an engine."""
        self._engines.update(stats)

    def http(self, route: str, status: int, seconds: float) -> None:
        """Record a finished HTTP request.

        Args:
            route: path pattern of the endpoint, such as ``/v1/requests/{id}/cancel``, or ``NO_ROUTE``; never a path
                that a client has chosen.
        """
        self._http_requests.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Set the function that returns the number of open connections. Every scrape calls it."""
        self._connections.set_function(count)

    def render(self) -> tuple[bytes, str]:
        """Current text of ``/metrics`` in Prometheus' format, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> dict[str, Any]:
        """Create the histogram ``name`` and return its child for each model: looking up the label of a model would take longer than
        an observation."""
        metric = Histogram(name, text, MODEL_LABELS, buckets=tuple(buckets), registry=self._registry)
        return {model: metric.labels(model, ENGINE) for model in self._model_names}


def length_buckets(longest: int) -> list[int]:
    """Upper bounds of histogram buckets: 1, 2, 5, 10, 20, 50, … up to ``longest``, as in vLLM."""
    steps = (digit * 10**exponent for exponent in range(len(str(longest))) for digit in (1, 2, 5))
    return [step for step in steps if step <= longest]
