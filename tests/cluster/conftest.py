"""For all real launches: a checkpoint for those that need just any, and ranks that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from golden import golden
from waiting_ranks import SharedLaunches


@pytest.fixture(scope="session")
def model() -> str:
    """A checkpoint for tests that need just any."""
    return str(golden("qwen2-tied").directory)


@pytest.fixture(scope="session")
def launches(tmp_path_factory) -> Iterator[SharedLaunches]:
    """For commands that end in order, whatever has run on their ranks before."""
    launches = SharedLaunches(tmp_path_factory.mktemp("launches"))
    yield launches
    launches.end()
