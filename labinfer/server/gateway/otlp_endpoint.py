"""Checks of ``--otlp-traces-endpoint`` that need no import of the OpenTelemetry library. The gateway makes them at its start."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from labinfer.base.errors import UserError

FLAG = "--otlp-traces-endpoint"
LIBRARY = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
TRACES_PATH = "/v1/traces"
"""URL path at which a collector receives traces (OTLP specification, "OTLP/HTTP Request")."""


def traces_url(endpoint: str) -> str:
    """URL of a collector for traces: ``endpoint``, with ``/v1/traces`` if it has no path.

    Raises:
        UserError: ``endpoint`` is no HTTP URL.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise UserError(
            f"{FLAG} {endpoint!r:.80} must be the URL of a collector for OTLP over HTTP, such as http://localhost:4318/v1/traces"
        )
    return endpoint if parts.path not in ("", "/") else parts._replace(path=TRACES_PATH).geturl()


def check_library() -> None:
    """Check that the OpenTelemetry library is installed, without importing it (only its parent packages).

    Raises:
        UserError: the library is missing.
    """
    try:
        is_installed = importlib.util.find_spec(LIBRARY) is not None
    except ImportError:
        is_installed = False
    if not is_installed:
        raise UserError(f"{FLAG} needs OpenTelemetry; pip install {PACKAGES}")
