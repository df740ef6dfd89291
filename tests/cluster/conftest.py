"""For all real launches: a checkpoint for those that need just any."""

from __future__ import annotations

import pytest
from golden import golden


@pytest.fixture(scope="session")
def model() -> str:
    """A checkpoint for tests that need just any."""
    return str(golden("qwen2-tied").directory)
