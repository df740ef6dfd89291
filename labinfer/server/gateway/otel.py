"""RequestTracer: OpenTelemetry spans of requests, sent to a collector by OTLP over HTTP.

The OpenTelemetry library is optional (extra ``otel``), so only ``RequestTracer`` imports it. OpenTelemetry's own environment
variables apply: ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_…`` and
``OTEL_EXPORTER_OTLP_…``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import labinfer
from labinfer.base.errors import UserError
from labinfer.requests.outputs import RequestState
from labinfer.server.gateway.otlp_endpoint import FLAG, check_library, traces_url

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

SPAN_NAME = "llm_request"
"""Name of every span. The name and the names of attributes are vLLM's."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Request headers by which a client passes its trace on (W3C Trace Context)."""
CLOSE_SECONDS = 2.0
"""Maximum seconds of exporting queued spans when the gateway ends."""
NANOSECONDS = 1e9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RequestEnd:
    """An engine request that has ended: the argument of ``Service.on_request_end``."""

    id: str
    """Id of the HTTP request, with the number of the prompt if the HTTP request has several prompts."""
    model: str
    headers: Mapping[str, str]
    """Headers of the HTTP request."""
    state: RequestState
    begin: float
    """Start of the HTTP request, in seconds of the gateway's monotonic clock."""
    end: float
    error: str | None
    """Code or type of the error that ended the request; None if the request is complete."""


class FirstErrorHandler(logging.Handler):
    """Log handler for the OpenTelemetry library. Of all errors since the last successful export, it logs the first as a warning and
    drops the others.

    Args:
        url: URL of the collector, for the message.
    """

    def __init__(self, url: str):
        super().__init__(logging.ERROR)
        self._url, self._has_logged = url, False

    def emit(self, record: logging.LogRecord) -> None:
        """Log ``record`` if it is the first error since the last successful export."""
        if not self._has_logged:
            self._has_logged = True
            logger.warning(
                "warning: traces cannot be sent to %s: %s; requests are answered without them, and further errors are not logged",
                self._url,
                record.getMessage(),
            )

    def reset(self) -> None:
        """Note that an export has succeeded, so that the next error is logged."""
        self._has_logged = False


class CollectorExporter:
    """A ``SpanExporter`` that resets ``errors`` after each successful export.

    Args:
        exporter: the library's exporter, which sends the spans.
    """

    def __init__(self, exporter: SpanExporter, errors: FirstErrorHandler):
        self._exporter, self._errors = exporter, errors
        self.shutdown, self.force_flush = exporter.shutdown, exporter.force_flush

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; the thread of the library's batch processor calls it."""
        result = self._exporter.export(spans)
        if result.name == "SUCCESS":
            self._errors.reset()
        return result


class RequestTracer:
    """Makes one span per engine request.

    A thread of the library sends the spans in batches, so a slow or unreachable collector delays no request: when the queue is
    full, the oldest spans are dropped. A request with the header ``traceparent`` continues the client's trace, and is sampled if
    the client says so. ``OTEL_TRACES_SAMPLER`` decides about other requests; by default all are sampled.

    Args:
        endpoint: URL of the collector, see ``traces_url``.
        clock: the gateway's monotonic clock in seconds.
        wall_clock: seconds since 1970.

    Raises:
        UserError: ``endpoint`` is no HTTP URL, the library is missing, or one of its environment variables is invalid.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float], wall_clock: Callable[[], float]):
        url = traces_url(endpoint)
        check_library()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        errors = FirstErrorHandler(url)
        library_log = logging.getLogger("opentelemetry")
        library_log.propagate = False
        library_log.handlers = [errors]
        own = Resource.create({"service.name": "labinfer", "service.version": labinfer.__version__})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        exporter = CollectorExporter(OTLPSpanExporter(url), errors)
        try:
            processor = BatchSpanProcessor(exporter)
        except ValueError as error:
            raise UserError(f"{FLAG}: an environment variable OTEL_BSP_… is invalid: {error}") from None
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("labinfer", labinfer.__version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._clock, self._wall_clock = clock, wall_clock

    def record(self, request: RequestEnd) -> None:
        """Enqueue the span of ``request``. An error is only logged."""
        try:
            self._record(request)
        except Exception as error:  # noqa: BLE001 - an error of the trace must not make the request fail
            logging.getLogger("opentelemetry").error("%s: %s", type(error).__name__, error)

    def _record(self, request: RequestEnd) -> None:
        context = self._extract({name: request.headers[name] for name in TRACE_HEADERS if name in request.headers})
        zero = self._wall_clock() - self._clock()
        span = self._tracer.start_span(
            SPAN_NAME, context, self._kind, start_time=round((zero + request.begin) * NANOSECONDS)
        )
        if span.is_recording():
            span.set_attributes(span_attributes(request))
            if request.error is not None:
                span.set_status(self._failed)
        span.end(round((zero + request.end) * NANOSECONDS))

    def close(self) -> None:
        """Export the queued spans. Blocks for up to ``CLOSE_SECONDS``."""
        closing = threading.Thread(target=self._provider.shutdown, name="trace export", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def span_attributes(request: RequestEnd) -> dict[str, Any]:
    """Attributes of the span of ``request``, with vLLM's names. Latencies are in seconds. No attribute contains text of a prompt or
    an answer."""
    state, sampling = request.state, request.state.request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request.id,
        "gen_ai.response.model": request.model,
        "gen_ai.usage.prompt_tokens": len(state.prompt_token_ids),
        "gen_ai.usage.completion_tokens": state.num_output_tokens,
        "gen_ai.latency.e2e": (e2e := request.end - request.begin),
    }
    if not state.request.pooling:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.request.n": sampling.num_choices,
        }
    queued = min((answer.queue_seconds for answer in state.answers if answer.queue_seconds is not None), default=None)
    if queued is not None:
        attributes["gen_ai.latency.time_in_queue"] = queued
        attributes["gen_ai.latency.time_in_model_inference"] = max(0.0, e2e - queued)
    if state.first_token_time:
        attributes["gen_ai.latency.time_to_first_token"] = first = state.first_token_time - request.begin
        attributes["gen_ai.latency.time_in_model_decode"] = max(0.0, e2e - first)
        if queued is not None:
            attributes["gen_ai.latency.time_in_model_prefill"] = max(0.0, first - queued)
    if request.error is not None:
        attributes["error.type"] = request.error
    return attributes
