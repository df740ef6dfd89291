"""Expected refusals of the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from labinfer.requests.openai.api_errors import ApiError


@contextmanager
def refused(status: int, match: str | None = None) -> Iterator[pytest.ExceptionInfo[ApiError]]:
    """Expect an ``ApiError`` of this HTTP status."""
    with pytest.raises(ApiError, match=match) as caught:
        yield caught
    assert caught.value.status == status
