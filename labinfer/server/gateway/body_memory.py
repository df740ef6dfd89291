"""BodyMemory: limit on the memory of all request bodies together."""

from __future__ import annotations

from labinfer.requests.openai import api_errors
from labinfer.server.gateway.admission_control import RETRY_SECONDS
from labinfer.server.gateway.options import MIB, ServerOptions

FREE_BYTES = 1 << 16
"""Maximum length, in bytes, of a body that is always accepted: the buffers of a connection are as large."""
FLAG = "--max-body-memory"


class BodyMemory:
    """Memory in bytes of the long request bodies that are being read, parsed or tokenized; limited per caller and in
    total."""

    def __init__(self, options: ServerOptions):
        largest = options.max_body_size * MIB
        self._most = max(options.max_body_memory * MIB, largest)
        self._most_per_caller = max(self._most // 2, largest)
        self._used: dict[str, int] = {}
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether too little memory is free to accept a request body of the maximum length from any client."""
        return self._num_bytes > self._most - self._most_per_caller

    def lease(self, caller: str) -> BodyLease:
        """Return a new lease for one body of ``caller``, which has reserved no memory yet."""
        return BodyLease(self, caller)

    def _add(self, caller: str, count: int) -> None:
        used = self._used.get(caller, 0) + count
        if count > 0 and used > self._most_per_caller:
            raise api_errors.rate_limited(
                f"request bodies of this caller use {self._most_per_caller} bytes, the limit per caller (half of "
                f"{FLAG}); send the next request when one is done",
                RETRY_SECONDS,
            )
        if count > 0 and self._num_bytes + count > self._most:
            raise api_errors.overloaded(
                f"request bodies use {self._most} bytes, the limit of {FLAG}; try again later", RETRY_SECONDS
            )
        self._num_bytes += count
        if used:
            self._used[caller] = used
        else:
            self._used.pop(caller, None)


class BodyLease:
    """The part of a ``BodyMemory`` that is reserved for one request body."""

    def __init__(self, memory: BodyMemory, caller: str):
        self._memory, self._caller = memory, caller
        self.num_bytes = 0
        """Number of bytes that are reserved for the body so far."""
        self._num_counted = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve ``num_bytes`` more, before they are stored.

        Raises:
            ApiError: 429 if the caller's share of the memory is used up, 503 if the total is.
        """
        self.num_bytes += num_bytes
        if self.num_bytes > FREE_BYTES:
            self._memory._add(self._caller, self.num_bytes - self._num_counted)
            self._num_counted = self.num_bytes

    def close(self) -> None:
        """Release the memory of the body. Idempotent."""
        self._memory._add(self._caller, -self._num_counted)
        self._num_counted = 0
