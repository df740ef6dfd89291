"""How many cases fuzzers run."""

from __future__ import annotations

import pytest


@pytest.fixture
def cases(request):
    """Number and seed, as ``fuzz`` takes them; a test names its sample."""

    def choose(sample: int) -> dict[str, int]:
        option = request.config.getoption
        return {"cases": option("--fuzz-cases") or sample, "seed": option("--fuzz-seed")}

    return choose
