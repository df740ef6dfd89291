"""Checkpoints in published formats, which several files of tests read."""

from __future__ import annotations

import pytest
from published_models import SHAPE, published_pairs


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """(quantised checkpoint, plain checkpoint of the same values) by name; made when they are asked for."""
    return published_pairs(tmp_path_factory, SHAPE)
