"""RecentRequests: lengths and arrival times of the last requests of each model, without text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

NUM_KEPT = 4096
"""Number of requests that are kept per model."""


class RequestSize(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Arrival time and lengths of a request, in the format of ``planner/workload.py``."""

    timestamp: int
    """Arrival time of the request, in milliseconds since 1970."""
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that were prefix-cache hits."""
    output_tokens: int


class RecentRequests:
    """Ring buffer of the last complete requests per model."""

    def __init__(self, model_names: Iterable[str]):
        self._requests: dict[str, deque[RequestSize]] = {name: deque(maxlen=NUM_KEPT) for name in model_names}

    def add(self, model: str, request: RequestSize) -> None:
        """Add a complete request to a model's ring buffer, in place of the oldest request if the buffer is full."""
        self._requests[model].append(request)

    def lines(self, model: str) -> bytes:
        """JSONL lines of the kept requests of a model, by arrival time."""
        requests = sorted(self._requests[model], key=lambda request: request.timestamp)
        return b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
