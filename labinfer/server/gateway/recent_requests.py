"""RecentRequests: lengths and arrivals of the last requests, without their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

NUM_KEPT = 4096
"""Requests of each model."""


class RequestSize(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as ``planner/workload.py`` reads it."""

    timestamp: int
    """Milliseconds since 1970 of its arrival."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the KV cache."""
    output_tokens: int


class RecentRequests:
    """The last requests of each model that ran to their ends."""

    def __init__(self, model_names: Iterable[str]):
        self._requests: dict[str, deque[RequestSize]] = {name: deque(maxlen=NUM_KEPT) for name in model_names}

    def add(self, model: str, request: RequestSize) -> None:
        """Keep a request that has ended, in the place of the oldest."""
        self._requests[model].append(request)

    def lines(self, model: str) -> bytes:
        """JSONL of what is kept, by arrival."""
        requests = sorted(self._requests[model], key=lambda request: request.timestamp)
        return b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
