"""Spans of ``--otlp-traces-endpoint``, as a collector receives them: protobuf messages of OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from scripted_host import Gateway, Host, gateway, wait_ready
from serving import Stream, serving, wait_for

from labinfer.base.errors import UserError
from labinfer.server.gateway import otlp_endpoint
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.otel import RequestTracer
from labinfer.server.link.frames import Accepted, Shutdown

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
"""Variables of the library: milliseconds between exports, and seconds until an export fails."""
SECONDS = 30.0


class Collector(ThreadingHTTPServer):
    """An OTLP receiver.

    Args:
        status: of its responses.
    """

    daemon_threads = True

    def __init__(self, status: int = 200):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        """All received spans, in the order of their ends."""
        scopes = [scope for one in self.requests for resource in one.resource_spans for scope in resource.scope_spans]
        return sorted((span for scope in scopes for span in scope.spans), key=lambda span: span.end_time_unix_nano)

    def wait(self, count: int) -> list[Span]:
        """The spans, when there are ``count``."""
        wait_for(lambda: len(self.spans) >= count, SECONDS)
        assert len(self.spans) == count
        return self.spans


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
        if self.server.status == 200:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    with Collector(status) as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        yield collector
        collector.shutdown()


@contextmanager
def traced(monkeypatch, url: str, variables: dict[str, str] = QUICK, **options) -> Iterator[Gateway]:
    """A gateway that sends its spans to ``url``."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with gateway(outlives_host=True, otlp_traces_endpoint=url, **options) as server:
        yield server


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


class SilentHost(Host):
    """Accepts requests, and never answers."""

    def _answer(self, key: str) -> None:
        self.link.send(Accepted(key))


def test_span_has_the_attributes_of_vllm(monkeypatch):
    begin = time.time_ns()
    with collecting() as collector, traced(monkeypatch, collector.url) as server, Host(server, " green blue"):
        wait_ready(server)
        fields = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 7}
        reply = server.ask("POST", "/v1/completions", {"prompt": "red blue"} | fields)
        assert reply.status == 200
        (span,) = collector.wait(1)
    assert (span.name, span.kind, span.status.code) == ("llm_request", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert not span.parent_span_id and len(span.trace_id) == 16
    found = attributes(span)
    latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.request.id": reply.headers["x-request-id"],
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": reply.body["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": reply.body["usage"]["completion_tokens"],
    }
    first, last = latencies["gen_ai.latency.time_to_first_token"], latencies["gen_ai.latency.e2e"]
    assert 0 < first <= last
    assert latencies["gen_ai.latency.time_in_model_decode"] == pytest.approx(last - first)
    assert begin < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(last * 1e9, abs=1e5)
    resource = {one.key: one.value.string_value for one in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "labinfer" and resource["service.version"]


def test_traceparent_is_continued_and_decides_what_is_sampled(monkeypatch):
    variables = QUICK | {"OTEL_SERVICE_NAME": "lab"}
    with collecting() as collector, traced(monkeypatch, collector.url, variables) as server, Host(server, " green"):
        wait_ready(server)
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "lab=1", "x-request-id": flags}
            assert server.ask("POST", "/v1/completions", {"prompt": "red"}, **headers).status == 200
        assert server.ask("POST", "/v1/completions", {"prompt": "red"}, traceparent="nonsense").status == 200
        sampled, own = collector.wait(2)
        name = collector.requests[0].resource_spans[0].resource.attributes
    assert (sampled.trace_id.hex(), sampled.parent_span_id.hex(), sampled.trace_state) == (TRACE, PARENT, "lab=1")
    assert attributes(sampled)["gen_ai.request.id"] == "01"
    assert own.trace_id.hex() != TRACE and not own.parent_span_id
    assert "lab" in {one.value.string_value for one in name if one.key == "service.name"}


def test_sampler_of_the_environment_is_for_requests_without_a_trace(monkeypatch):
    variables = QUICK | {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    with collecting() as collector, traced(monkeypatch, collector.url, variables) as server, Host(server, " green"):
        wait_ready(server)
        assert server.complete().status == 200
        assert server.complete().status == 200
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert server.ask("POST", "/v1/completions", {"prompt": "red"}, **headers).status == 200
        (span,) = collector.wait(1)
        assert span.trace_id.hex() == TRACE


def test_each_prompt_has_a_span_and_so_has_a_stream(monkeypatch):
    with collecting() as collector, traced(monkeypatch, collector.url) as server, Host(server, " green"):
        wait_ready(server)
        body = {"prompt": ["red", "blue red"]}
        assert server.ask("POST", "/v1/completions", body, **{"x-request-id": "two"}).status == 200
        collector.wait(2)
        Stream(server, {"max_tokens": 60}, **{"x-request-id": "stream"}).finish()
        found = {attributes(span)["gen_ai.request.id"]: attributes(span) for span in collector.wait(3)}
    assert found.keys() == {"two-0", "two-1", "stream"}
    assert found["two-1"]["gen_ai.usage.prompt_tokens"] > found["two-0"]["gen_ai.usage.prompt_tokens"]


def test_failed_request_has_the_code_of_its_error(monkeypatch):
    options = {"request_timeout": 0.3}
    with collecting() as collector, traced(monkeypatch, collector.url, **options) as server, SilentHost(server, "red"):
        wait_ready(server)
        server.complete().check_error(408, "timeout", "request_timeout")
        (span,) = collector.wait(1)
    found = attributes(span)
    assert (span.status.code, found["error.type"]) == (Status.STATUS_CODE_ERROR, "request_timeout")
    assert found["gen_ai.latency.e2e"] >= 0.3 and "gen_ai.latency.time_to_first_token" not in found


def test_queued_spans_are_sent_when_the_server_ends(monkeypatch):
    with collecting() as collector:
        variables = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        with traced(monkeypatch, collector.url, variables) as server, Host(server, " green") as host:
            wait_ready(server)
            assert server.complete().status == 200
            assert not collector.spans
            host.link.send(Shutdown())
            assert server.process.wait(SECONDS) == 0
        collector.wait(1)


@pytest.mark.parametrize("status", [None, 400])
def test_collector_that_fails_costs_no_request_and_one_line(monkeypatch, capfd, status):
    """It is not there at all (None), or refuses what it is sent."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(collecting(status)).url if status else "http://127.0.0.1:9"
        server = stack.enter_context(traced(monkeypatch, url, log_level="warning"))
        stack.enter_context(Host(server, " green"))
        wait_ready(server)
        log = ""
        deadline = time.monotonic() + SECONDS
        while "cannot be sent" not in log and time.monotonic() < deadline:
            assert server.complete().status == 200
            time.sleep(0.2)
            log += capfd.readouterr().err
        for _ in range(3):
            assert server.complete().status == 200
            time.sleep(0.2)
        log += capfd.readouterr().err
    assert log.count("cannot be sent") == 1, log
    assert f"labinfer: warning: traces cannot be sent to {url}/v1/traces: " in log
    assert "Traceback" not in log


@pytest.mark.parametrize("url", ["grpc://localhost:4317", "localhost:4318", "http://", "http://[x", "http://a:99999"])
def test_url_must_be_of_http(url):
    with pytest.raises(UserError, match="must be the URL of a collector for OTLP over HTTP, such as http"):
        ServerOptions(otlp_traces_endpoint=url)


def test_path_of_the_url_is_added_unless_it_is_given():
    assert (
        otlp_endpoint.traces_url("http://lab:4318")
        == otlp_endpoint.traces_url("http://lab:4318/")
        == "http://lab:4318/v1/traces"
    )
    assert otlp_endpoint.traces_url("https://lab/otlp/v1/traces") == "https://lab/otlp/v1/traces"


def test_missing_library_is_named_at_the_start(monkeypatch):
    monkeypatch.setattr(otlp_endpoint, "LIBRARY", "opentelemetry_is_missing.exporter")
    with pytest.raises(UserError, match="needs OpenTelemetry; pip install opentelemetry-sdk opentelemetry-exporter"):
        ServerOptions(otlp_traces_endpoint="http://localhost:4318").absolute()
    ServerOptions().absolute()


def test_variable_that_the_library_refuses_is_named_at_the_start(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")  # less than the default size of a batch
    with pytest.raises(
        UserError, match=r"--otlp-traces-endpoint: an environment variable OTEL_BSP_… is invalid: max_export"
    ):
        RequestTracer("http://localhost:4318", time.monotonic, time.time)


def test_engine_adds_the_times_of_its_queue_and_prefill(monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    arguments = ("--dtype", "float32", "--num-kv-blocks", "64", "--otlp-traces-endpoint")
    with collecting() as collector, serving(*arguments, collector.url) as server:
        reply = server.complete(n=2, ignore_eos=True)
        assert reply.status == 200
        (span,) = collector.wait(1)
        found = attributes(span)
        latency = {name.rpartition(".")[2]: value for name, value in found.items() if ".latency." in name}
        assert (found["gen_ai.request.n"], found["gen_ai.usage.completion_tokens"]) == (2, 6)
        assert 0 <= latency["time_in_queue"] <= latency["time_to_first_token"] < latency["e2e"]
        parts = latency["time_in_model_prefill"] + latency["time_in_model_decode"]
        assert parts == pytest.approx(latency["time_in_model_inference"])
        assert server.post("/v1/embeddings", {"input": "red"})[0] == 200
        _, span = collector.wait(2)
        assert "gen_ai.request.temperature" not in attributes(span)
        assert "rror" not in server.text
